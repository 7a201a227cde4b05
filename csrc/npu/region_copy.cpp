// The region copy on Ascend. Regions that are contiguous on both sides are copied by CANN, one call each; the others by
// torch_npu's kernels, since CANN's 2-D copy is documented between host and device only (CANN 8.0). In a build without
// libepload_npu, and on any other private device, torch's kernels copy all regions.
#include "../region_copy.h"

#include "../strided.h"
#include "broadcast.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

namespace epload {
namespace {

// CANN's copy has no fp8 on Ascend 910 (documentation of aclnnInplaceCopy, CANN 8.5), so the host converts it, and what
// stays fp8 is copied as bytes.
void unpack_by_host(const at::Tensor& bucket, const at::Tensor& tensor, RegionCopy copy) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  auto region = tensor;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    region = region.narrow(static_cast<int64_t>(d), copy.start[d], copy.size[d]);
    copy.start[d] = 0;
  }
  const auto bytes = bucket.narrow(0, copy.bucket_offset, span_of(copy)).cpu();
  const auto converted = at::empty(copy.size, tensor.options().device(at::kCPU));
  copy.bucket_offset = 0;
  copy_one_aten(bytes, converted, copy, Direction::kUnpack);
  region.copy_(converted);
}

void region_copy_npu(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  const c10::DeviceGuard on_device(bucket.device());
  const auto& library = npu_library();
  if (library.copy == nullptr) {
    region_copy_aten(bucket, tensors, copies, direction);
    return;
  }
  std::vector<EploadNpuCopy> runs;
  char* const base = static_cast<char*>(bucket.data_ptr());
  for (auto copy : copies) {
    auto tensor = tensors[copy.tensor];
    if (tensor.scalar_type() == copy.dtype && c10::isFloat8Type(copy.dtype)) {
      tensor = tensor.view(at::kByte);
      copy.dtype = at::kByte;
    }
    const auto s = collapse(tensor, copy);
    if (tensor.scalar_type() != copy.dtype && c10::isFloat8Type(copy.dtype) && direction == Direction::kUnpack) {
      unpack_by_host(bucket, tensor, copy);
    } else if (tensor.scalar_type() != copy.dtype || !s.size.empty()) {
      copy_one_aten(bucket, tensor, copy, direction);
    } else if (const auto nbytes = static_cast<uint64_t>(s.run * tensor.element_size()); nbytes > 0) {
      const bool unpack = direction == Direction::kUnpack;
      char* const there = static_cast<char*>(tensor.data_ptr()) + s.tensor;
      runs.push_back({unpack ? there : base + s.bucket, unpack ? base + s.bucket : there, nbytes});
    }
  }
  if (!runs.empty()) {
    EploadNpuError error;
    const int status = library.copy(runs.data(), runs.size(), &error);
    TORCH_CHECK(status != kEploadNpuThrew, "epload: copies on ", bucket.device(), " failed: ", error.text);
    TORCH_CHECK(status == kEploadNpuDone, "epload: aclrtMemcpyAsync on ", bucket.device(), " failed with ", status);
  }
}

const RegisterDriver registered_npu(
    c10::DeviceType::PrivateUse1, {.region_copy = region_copy_npu, .plain = has_plain_format});

} // namespace
} // namespace epload
