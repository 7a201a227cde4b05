// Digests of regions: by them a rank proves that what it holds is what the checkpoint says.
#pragma once

#include "region_copy.h"

#include <cstdint>
#include <vector>

namespace epload {

// A box of elements in memory.
struct MemoryBox {
  int64_t begin = 0; // where the first is, bytes
  int64_t run = 0;   // bytes that follow one another; 0 for a box that holds none
  Dims size, stride; // of the dims around a run, outermost first; strides in bytes
};

// A region's box in its tensor's data, and in its bucket.
MemoryBox box_in_tensor(const at::Tensor& tensor, const RegionCopy& copy);
MemoryBox box_in_bucket(const RegionCopy& copy);

// The checksum of the box's elements in row-major order.
uint64_t digest(const char* data, const MemoryBox& box);

// Of each region in `tensors` (on CPU).
std::vector<uint64_t> digest_tensors(at::TensorList tensors, const std::vector<RegionCopy>& copies);

// The digest that a region will have once it is unpacked into a tensor of `dtype`; `tensor` and `start` of the copy do
// not matter. `bucket` is contiguous uint8 on CPU, and the copy has been checked against it.
uint64_t digest_unpacked(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype);

} // namespace epload
