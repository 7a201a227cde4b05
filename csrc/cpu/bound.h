// Regions of a model's tensors on CPU, worked out once for all its loads: what follows from layouts is kept, and each
// load hands over its tensors once, not with every bucket.
#pragma once

#include "reads.h"
#include "regions.h"

#include "../digest.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace epload {

// Tensors that somebody else keeps alive. Here no reference is counted: it would be for each bucket, and an atomic
// operation on memory that is in no cache.
class Borrowed {
 public:
  explicit Borrowed(const std::vector<at::TensorImpl*>& tensors);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const std::vector<at::Tensor>& operator*() const {
    return tensors_;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

// Of some tensors, one after the other: dtype, dims (-1 if it is not dense), sizes, strides. Nothing changes it, as
// what was bound to it is not checked again; so it is no tensor, which Python could write to.
class Layouts : public torch::CustomClassHolder {
 public:
  explicit Layouts(const std::vector<at::Tensor>& tensors);

  size_t count() const {
    return begins_.size();
  }

  // Whether a tensor is laid out as the one of that number was.
  bool fits(int64_t i, const at::Tensor& tensor) const;

 private:
  std::vector<int64_t> words_;
  std::vector<size_t> begins_; // of each tensor
};

// The tensors of one load, which it keeps alive.
class Gathered : public torch::CustomClassHolder {
 public:
  // `known`: layouts of an earlier load; null for none.
  Gathered(std::vector<at::Tensor> tensors, const c10::intrusive_ptr<Layouts>& known);
  ~Gathered() override;
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

  // Those that were known, if they fit. Null if one is foreign.
  const c10::intrusive_ptr<Layouts>& layouts() const {
    return layouts_;
  }

  // Whether one is of a class that stands for other tensors: then nothing can be bound to them.
  bool foreign() const {
    return foreign_;
  }

  // Some of them, by number.
  Borrowed some(c10::IntArrayRef which) const;

  // As it is now. Throws ValueError if that of one cannot be used, or is no longer laid out as when it was gathered.
  Memory memory(c10::IntArrayRef which) const;

  // Tells autograd that they were written in place.
  void written(c10::IntArrayRef which) const;

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<Layouts> layouts_;
  bool foreign_ = false;
};

// Numbers of tensors, in this load and in others that were made with its layouts and found them equal.
class Which {
 public:
  Which(const Gathered& tensors, c10::IntArrayRef which);

  // Throws if the layouts are others.
  c10::IntArrayRef of(const Gathered& tensors) const;

 private:
  std::vector<int64_t> which_;
  c10::intrusive_ptr<Layouts> layouts_;
};

// A copy table (see decode_copies) that counts in some of the tensors, for buckets of so many bytes.
class BoundCopies : public torch::CustomClassHolder {
 public:
  BoundCopies(const Gathered& tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes);

  void unpack(const at::Tensor& bucket, const Gathered& tensors) const;

 private:
  Which which_;
  int64_t nbytes_;
  Regions regions_;
};

// The same for regions of files: row i is read from byte `offsets[i]` of file `files[i]`, of so many.
class BoundReads : public torch::CustomClassHolder {
 public:
  BoundReads(
      const Gathered& tensors,
      c10::IntArrayRef which,
      const at::Tensor& copies,
      c10::IntArrayRef files,
      c10::IntArrayRef offsets,
      int64_t file_count);

  ReadOutcome run(c10::IntArrayRef descriptors, const Gathered& tensors, int64_t threads) const;

 private:
  Which which_;
  Reads reads_;
};

// Digests (see digest.h) of a copy table's regions, in the tensors.
class BoundDigests : public torch::CustomClassHolder {
 public:
  BoundDigests(const Gathered& tensors, c10::IntArrayRef which, const at::Tensor& copies);

  std::vector<uint64_t> digests(const Gathered& tensors) const;

 private:
  Which which_;
  std::vector<std::pair<int64_t, MemoryBox>> boxes_;     // each in one of the tensors
  std::vector<std::pair<size_t, RegionCopy>> converted_; // rows, which have no box
};

} // namespace epload
