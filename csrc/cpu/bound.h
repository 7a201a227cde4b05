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

// Tensors that somebody else keeps alive. To refer to one that Python knows takes the interpreter's lock, and with it,
// while other threads run Python, milliseconds; here no reference is counted.
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

// The tensors of one load, which the caller keeps alive.
class Gathered : public torch::CustomClassHolder {
 public:
  // By their TensorImpls' addresses: to hand over a list of 18,867 tensors takes as long as all else that is done here.
  // `known`: layouts of an earlier load; undefined for none.
  Gathered(c10::IntArrayRef addresses, const at::Tensor& known);

  // Of each tensor: dtype, dims (-1 if it is not dense), sizes, strides. Those that are known, if they are equal.
  const at::Tensor& layouts() const {
    return layouts_;
  }

  // Whether one is of a class that stands for other tensors: then nothing can be bound to them.
  bool foreign() const {
    return foreign_;
  }

  // Some of them, by number.
  Borrowed some(c10::IntArrayRef which) const;

  // Throws ValueError if the memory of one cannot be used.
  Memory memory(c10::IntArrayRef which) const;

  // Tells autograd that they were written in place.
  void written(c10::IntArrayRef which) const;

 private:
  Borrowed tensors_;
  std::vector<char*> data_; // null where it has to be looked at again
  at::Tensor layouts_;
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
  at::Tensor layouts_;
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
