// Digests of regions: by them a rank proves that what it holds is what the checkpoint says.
#pragma once

#include "region_copy.h"

#include <cstdint>
#include <vector>

namespace epload {

// The checksum of each region's elements in row-major order, as they lie in `tensors` (on CPU).
std::vector<uint64_t> digest_tensors(at::TensorList tensors, const std::vector<RegionCopy>& copies);

// The checksum that each region would have once it is unpacked into a tensor of `dtypes[i]`; `tensor` and `start` of a
// copy do not matter. `bucket` is contiguous uint8 on CPU, and the copies are checked against it.
std::vector<uint64_t> digest_bucket(
    const at::Tensor& bucket, const std::vector<RegionCopy>& copies, const std::vector<at::ScalarType>& dtypes);

} // namespace epload
