// Digests of regions, by which a rank proves that its shards are equal to the checkpoint.
#pragma once

#include "region_copy.h"

#include <cstdint>
#include <vector>

namespace epload {

// A box of elements in memory.
struct MemoryBox {
  int64_t begin = 0; // offset of the first, in bytes
  int64_t run = 0;   // contiguous bytes; 0 for an empty box
  Dims size, stride; // of the dims outside a run, outermost first; strides in bytes
};

// A region's box in its tensor's data, and in its bucket.
MemoryBox box_in_tensor(const at::Tensor& tensor, const RegionCopy& copy);
MemoryBox box_in_bucket(const RegionCopy& copy);

// The checksum of the box's elements in row-major order.
uint64_t digest(const char* data, const MemoryBox& box);

// Whether a region's elements are converted when it is copied between its bucket and a tensor of `dtype`. The digest of
// such a region counts all NaN as equal: which one a conversion gives depends on how many elements it does at once.
inline bool converts(const RegionCopy& copy, at::ScalarType dtype) {
  return copy.dtype != dtype;
}

// The digest of a region that is converted, as it lies in its tensor (on CPU).
uint64_t digest_converted(const at::Tensor& tensor, const RegionCopy& copy);

// Of each region in `tensors` (on CPU).
std::vector<uint64_t> digest_tensors(at::TensorList tensors, const std::vector<RegionCopy>& copies);

// What a region that is converted becomes in a tensor of `dtype`: a contiguous one of the region's size, with one NaN
// for all. `tensor` and `start` of the copy do not matter. `bucket` is contiguous uint8 on CPU, and the copy has been
// checked against it.
at::Tensor converted(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype);

// The digest that a region of such a bucket will have in a tensor of `dtype`.
uint64_t digest_unpacked(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype);

// Digests as the ops return them, int64.
at::Tensor as_tensor(const std::vector<uint64_t>& digests);

} // namespace epload
