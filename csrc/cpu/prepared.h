// Prepared regions of CPU tensors: what depends on layouts alone is computed once, and used by every load into tensors
// of these layouts.
#pragma once

#include "reads.h"
#include "regions.h"
#include "tensor_list.h"

#include "../digest.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace epload {

// The rows of a copy table (see decode_copies) for buckets of `nbytes`. Column 0 counts in `which`.
class PreparedCopies : public torch::CustomClassHolder {
 public:
  PreparedCopies(const TensorList& tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes);

  void pack(const at::Tensor& bucket, const TensorList& tensors) const;
  void unpack(const at::Tensor& bucket, const TensorList& tensors) const;

 private:
  void check(const char* op, const at::Tensor& bucket) const;

  Selection which_;
  int64_t nbytes_;
  Regions regions_;
};

// The same for regions of files: row i is read from byte `offsets[i]` of file `files[i]`, of `file_count`.
class PreparedReads : public torch::CustomClassHolder {
 public:
  PreparedReads(
      const TensorList& tensors,
      c10::IntArrayRef which,
      const at::Tensor& copies,
      c10::IntArrayRef files,
      c10::IntArrayRef offsets,
      int64_t file_count);

  ReadOutcome run(c10::IntArrayRef descriptors, const TensorList& tensors, int64_t threads, bool direct) const;

 private:
  Selection which_;
  Reads reads_;
};

// The digests (see digest.h) of a copy table's regions, in the tensors.
class PreparedDigests : public torch::CustomClassHolder {
 public:
  PreparedDigests(const TensorList& tensors, c10::IntArrayRef which, const at::Tensor& copies);

  std::vector<uint64_t> digests(const TensorList& tensors) const;

 private:
  Selection which_;
  std::vector<std::pair<int64_t, MemoryBox>> boxes_;     // index of the tensor, and the region in it
  std::vector<std::pair<size_t, RegionCopy>> converted_; // rows that are converted, which have no box
};

// As register_tensor_list_classes.
void register_prepared_classes();

} // namespace epload
