// The batched strided copy between a byte bucket and many tensors, for packing and unpacking.
#pragma once

#include "copy_table.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace epload {

enum class Direction { kPack, kUnpack }; // tensors -> bucket, bucket -> tensors

// Runs the copies on the current stream of the bucket's device. Where dtypes differ, the value is converted as
// Tensor.copy_ does. Regions of one call must not overlap in the destination. `bucket` is contiguous uint8.
void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

using RegionCopyFn = void (*)(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

// What keeps a wrong bucket from being unpacked, decided on the device: see unpack_table in region_tables.py.
struct Guard {
  at::Tensor expected, stopped, flag;
};

// Copies from a bucket to tensors, ready to run any number of times on the stream that was current when they were made,
// while the memory of all stays where it is. They keep none of it alive.
class ReadyCopies {
 public:
  virtual ~ReadyCopies() = default;
  // Whether a guard covers all of them.
  virtual bool guardable() const = 0;
  // With the same bucket and tensors again; `guard` may be null.
  virtual void run(const at::Tensor& bucket, at::TensorList tensors, const Guard* guard) const = 0;
};

// What a device with kernels of its own can do besides.
struct RegionKernels {
  bool (*usable)(c10::Device device) = nullptr; // whether the kernels run there; the device need not be present
  // For unpacking; null where the kernels do not run.
  std::shared_ptr<const ReadyCopies> (*ready)(
      const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies) = nullptr;
};

const RegionKernels& region_kernels(c10::DeviceType device);

// Each device's implementation registers itself; a device without one gets `region_copy_aten`.
struct RegisterRegionCopy {
  RegisterRegionCopy(c10::DeviceType device, RegionCopyFn fn, RegionKernels kernels = {});
};

// One Tensor.copy_ per region: works on every device, and converts dtypes on CPU.
void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction);

} // namespace epload
