// Regions of CPU tensors, and their copies.
#pragma once

#include "../region_copy.h"
#include "../strided.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace epload {

// The memory of some tensors, which outlive it: where the data of each begins, and the tensors, for regions that
// convert.
struct Memory {
  std::vector<char*> data;
  at::TensorList tensors;
};

// The memory of those tensors that the copies name.
Memory memory_of(at::TensorList tensors, const std::vector<RegionCopy>& copies);

// One region of a tensor, of which only the layout is used.
class Region {
 public:
  Region(const at::Tensor& tensor, const RegionCopy& copy);

  int64_t tensor() const {
    return tensor_;
  }

  bool converts() const {
    return converting_ != nullptr;
  }

  // Only for a region that does not convert; its runs are in bytes.
  const Strided& strided() const {
    return strided_;
  }

  // Copies all of it on this thread. `bucket` begins `skipped` bytes into the bucket of the region.
  void copy(const at::Tensor& bucket, int64_t skipped, const Memory& memory, Direction direction, bool stream) const;

  // Copies rows [begin, end) of its outermost dim, or bytes [begin, end) of its only run. Not for a region that
  // converts. `bucket` and `tensor` point to its first element.
  void copy_part(char* bucket, char* tensor, int64_t begin, int64_t end, Direction direction, bool stream) const;

 private:
  int64_t tensor_;
  Strided strided_;
  std::unique_ptr<const RegionCopy> converting_;
};

// The regions of one bucket, in pieces that threads take.
class Regions {
 public:
  Regions(at::TensorList tensors, const std::vector<RegionCopy>& copies);

  void copy(const at::Tensor& bucket, const Memory& memory, Direction direction) const;

 private:
  // A piece of a region (see Region::copy_part); all of it if `begin` is negative.
  struct Piece {
    size_t region;
    int64_t begin, end;
  };

  std::vector<Region> regions_;
  std::vector<Piece> pieces_;
  int64_t nbytes_ = 0;
};

} // namespace epload
