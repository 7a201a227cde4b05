#include "region_copy.h"

#include "dtypes.h"
#include "strided.h"
#include "tensor_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/DeviceType.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

namespace epload {

Driver& driver_of(c10::DeviceType device) {
  static std::array<Driver, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> drivers{};
  return drivers.at(static_cast<size_t>(device));
}

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction) {
  // Writes inference tensors, too; the op marks what it has written.
  const at::AutoDispatchBelowADInplaceOrView plain;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(copy.dtype));
  const int64_t span = span_of(copy);
  if (span == 0) {
    return;
  }
  int64_t offset = tensor.storage_offset();
  for (size_t d = 0; d < copy.size.size(); ++d) {
    offset += copy.start[d] * tensor.stride(static_cast<int64_t>(d));
  }
  const auto theirs = at::as_strided(tensor, copy.size, tensor.strides(), offset);
  auto bytes = bucket.narrow(0, copy.bucket_offset, span);
  const auto address = reinterpret_cast<uintptr_t>(bytes.const_data_ptr());
  if (bytes.storage_offset() % itemsize != 0 || address % static_cast<uintptr_t>(itemsize) != 0) {
    // A view of a wider dtype needs an aligned start: go through a packed copy, its elements as rows of bytes. Only
    // bytes of the region are touched, since another region may lie between them.
    Dims bytes_size(copy.size), bytes_stride;
    bytes_size.push_back(itemsize);
    for (const auto stride : copy.bucket_stride) {
      bytes_stride.push_back(stride * itemsize);
    }
    bytes_stride.push_back(1);
    const auto elements = bytes.as_strided(bytes_size, bytes_stride, bytes.storage_offset());
    if (direction == Direction::kUnpack) {
      theirs.copy_(elements.clone(at::MemoryFormat::Contiguous).view(copy.dtype).squeeze(-1), /*non_blocking=*/true);
    } else {
      elements.copy_(theirs.to(copy.dtype).contiguous().unsqueeze(-1).view(at::kByte), /*non_blocking=*/true);
    }
    return;
  }
  const auto typed = bytes.view(copy.dtype);
  const auto ours = typed.as_strided(copy.size, copy.bucket_stride, typed.storage_offset());
  if (direction == Direction::kUnpack) {
    theirs.copy_(ours, /*non_blocking=*/true);
  } else {
    ours.copy_(theirs, /*non_blocking=*/true);
  }
}

void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  for (const auto& copy : copies) {
    copy_one_aten(bucket, tensors[copy.tensor], copy, direction);
  }
}

void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  const auto fn = driver_of(bucket.device().type()).region_copy;
  (fn != nullptr ? fn : region_copy_aten)(bucket, tensors, copies, direction);
}

namespace {

void pack(const at::Tensor& bucket, at::TensorList sources, const at::Tensor& copies) {
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(bucket, sources, copies);
  mark_written(bucket);
  region_copy(bucket, sources, rows, Direction::kPack);
}

void unpack(const at::Tensor& bucket, at::TensorList targets, const at::Tensor& copies) {
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(bucket, targets, copies);
  mark_written(targets);
  region_copy(bucket, targets, rows, Direction::kUnpack);
}

// The table of dtypes.h: names and codes.
std::tuple<std::vector<std::string>, std::vector<int64_t>> dtypes() {
  std::tuple<std::vector<std::string>, std::vector<int64_t>> table;
  for (const auto& row : kDtypes) {
    std::get<0>(table).emplace_back(row.name);
    std::get<1>(table).push_back(static_cast<int64_t>(row.type));
  }
  return table;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("pack", TORCH_FN(epload::pack));
  m.impl("unpack", TORCH_FN(epload::unpack));
  m.impl("dtypes", TORCH_FN(epload::dtypes));
}
