// The batched strided copy between a byte bucket and many tensors, for packing and unpacking.
#pragma once

#include "copy_table.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace epload {

enum class Direction { kPack, kUnpack }; // tensors -> bucket, bucket -> tensors

// Runs the copies on the current stream of the bucket's device. Where dtypes differ, the value is converted as
// Tensor.copy_ does. Regions of one call must not overlap in the destination. `bucket` is contiguous uint8.
void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

using RegionCopyFn = void (*)(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

// Each device's implementation registers itself; a device without one gets `region_copy_aten`.
struct RegisterRegionCopy {
  RegisterRegionCopy(c10::DeviceType device, RegionCopyFn fn);
};

// One Tensor.copy_ per region: works on every device, and converts dtypes on CPU.
void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction);

} // namespace epload
