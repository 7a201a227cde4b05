// For tensors on CPU that are written to again and again: regions of them, worked out once. A reload of 18,867 tensors
// then hands over no tensor and looks at each once.
#pragma once

#include "reads.h"
#include "regions.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

namespace epload {

// Tensors that it does not keep alive. Layouts are as they were when it was made.
class BoundTensors : public torch::CustomClassHolder {
 public:
  explicit BoundTensors(at::TensorList tensors);

  struct State {
    bool same;       // whether all are there and have the dtypes, shapes and strides that they had
    int64_t bad;     // the first whose memory cannot be used; -1 for none
    std::string why; // that one cannot
  };

  // Finds out where their data is now. What is bound to them can be used until they change, if they are the same.
  State refresh();

  // Throws if it is gone.
  at::Tensor tensor(int64_t i) const;
  std::vector<at::Tensor> tensors(c10::IntArrayRef which) const;

  // Of some of them, as of a list.
  Memory memory(c10::IntArrayRef which) const;

  // Tells autograd that they were written in place.
  void written(c10::IntArrayRef which) const;

 private:
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  std::vector<Weak> tensors_;
  std::vector<int64_t> layouts_; // of each: dtype, dims, sizes, strides
  std::vector<char*> data_;      // null for one that is gone
};

// A copy table (see decode_copies) that counts in some of the tensors, bound to them.
class BoundCopies : public torch::CustomClassHolder {
 public:
  // For buckets of so many bytes.
  BoundCopies(
      c10::intrusive_ptr<BoundTensors> tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes);

  void unpack(const at::Tensor& bucket) const;

 private:
  c10::intrusive_ptr<BoundTensors> tensors_;
  std::vector<int64_t> which_;
  int64_t nbytes_;
  Regions regions_;
};

// The same for regions of files.
class BoundReads : public torch::CustomClassHolder {
 public:
  // Row i is read from byte `offsets[i]` of file `files[i]`, of so many.
  BoundReads(
      c10::intrusive_ptr<BoundTensors> tensors,
      c10::IntArrayRef which,
      const at::Tensor& copies,
      c10::IntArrayRef files,
      c10::IntArrayRef offsets,
      int64_t file_count);

  ReadOutcome run(c10::IntArrayRef descriptors, int64_t threads) const;

 private:
  c10::intrusive_ptr<BoundTensors> tensors_;
  std::vector<int64_t> which_;
  Reads reads_;
};

} // namespace epload
