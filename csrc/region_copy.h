// The batched strided copy between a byte bucket and many tensors, for packing and unpacking.
#pragma once

#include "driver.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace epload {

// Runs the copies on the current stream of the bucket's device. Where dtypes differ, the value is converted as
// Tensor.copy_ does; a device whose driver has no region copy gets `region_copy_aten`. Regions of one call must not
// overlap in the destination. `bucket` is contiguous uint8.
void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

// One Tensor.copy_ per region: works on every device, and converts dtypes on CPU.
void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction);

} // namespace epload
