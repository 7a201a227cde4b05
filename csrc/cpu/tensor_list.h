// The CPU tensors that a load writes to, passed to this library once per load. There may be 20,000 of them: as
// arguments of each op they would cost more than all other work on them.
//
// They come from the Python module _C, which knows Python but not torch. It passes the TensorImpls of tensors that
// Python keeps alive to a C function of this library, and Python passes the ticket that it returns to an op. So no op
// takes an address.
#pragma once

#include "regions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" {
// Keeps the tensors alive for the op that takes the ticket, and returns the ticket, a positive number. On failure
// returns 0 and writes the error to `message`, a buffer of `room` bytes. The caller holds the GIL, so that no other
// thread drops a tensor meanwhile.
__attribute__((visibility("default"))) int64_t
epload_register_tensors(void* const* impls, uint64_t count, char* message, uint64_t room) noexcept;

// Writes to `kinds` a number for each tensor that is equal for tensors of one dtype on one device. On failure returns 0
// and writes the error to `message`.
__attribute__((visibility("default"))) int64_t
epload_tensor_kinds(void* const* impls, uint64_t count, int64_t* kinds, char* message, uint64_t room) noexcept;
}

namespace epload {

// Tensors that another object keeps alive. Their references are not counted here: counting would be an atomic operation
// per tensor and bucket, on memory that is in no cache.
class BorrowedTensors {
 public:
  explicit BorrowedTensors(const std::vector<at::TensorImpl*>& tensors);
  ~BorrowedTensors();
  BorrowedTensors(const BorrowedTensors&) = delete;
  BorrowedTensors& operator=(const BorrowedTensors&) = delete;

  const std::vector<at::Tensor>& operator*() const {
    return tensors_;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

// The dtypes, shapes and strides of a list of tensors. Immutable, as what was prepared for them is not checked again;
// so not a tensor, which Python could write to.
class Layouts : public torch::CustomClassHolder {
 public:
  explicit Layouts(const std::vector<at::Tensor>& tensors);

  size_t count() const {
    return begins_.size();
  }

  // Whether `tensor` has the layout of the i-th tensor.
  bool fits(int64_t i, const at::Tensor& tensor) const;

 private:
  std::vector<int64_t> words_; // for each tensor dtype, dims (-1 if it is not dense), sizes, strides
  std::vector<size_t> begins_; // of each tensor in `words_`
};

// The tensors of one load, which it keeps alive. Not at::TensorList, which borrows them.
class TensorList : public torch::CustomClassHolder {
 public:
  // `known`: layouts of an earlier load; null for none.
  TensorList(std::vector<at::Tensor> tensors, const c10::intrusive_ptr<Layouts>& known);
  ~TensorList() override;
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  // The known layouts if they fit. Null if a tensor is foreign.
  const c10::intrusive_ptr<Layouts>& layouts() const {
    return layouts_;
  }

  // Whether a tensor is of a class that wraps other tensors: then nothing can be prepared for them.
  bool foreign() const {
    return foreign_;
  }

  // The tensors with these indices.
  BorrowedTensors select(c10::IntArrayRef which) const;

  // Their memory. Throws ValueError if that of one cannot be used, or if it no longer has the layout that it had when
  // the list was made.
  Memory memory(c10::IntArrayRef which) const;

  // Tells autograd that they were written in place.
  void mark_written(c10::IntArrayRef which) const;

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<Layouts> layouts_;
  bool foreign_ = false;
};

// Indices into a tensor list, valid for every list that has the same Layouts.
class Selection {
 public:
  Selection(const TensorList& tensors, c10::IntArrayRef which);

  // Throws ValueError if the list has other layouts.
  c10::IntArrayRef of(const TensorList& tensors) const;

 private:
  std::vector<int64_t> which_;
  c10::intrusive_ptr<Layouts> layouts_;
};

// Registers the classes above with torch, once. Schemas and implementations that name them must come after, in
// whichever order the linker runs them.
void register_tensor_list_classes();

} // namespace epload
