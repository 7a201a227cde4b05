#include "broadcast.h"

#include "library.h"

namespace epload {

bool broadcast_hccl(c10d::Backend& backend, const at::Tensor& flat, int root) {
  if (npu::library().broadcast == nullptr) {
    return false;
  }
  const int status = npu::library().broadcast(
      &backend, flat.data_ptr(), static_cast<uint64_t>(flat.nbytes()), static_cast<uint32_t>(root));
  TORCH_CHECK(status == kEploadNpuDone || status == kEploadNpuNotYet, "epload: HcclBroadcast failed with ", status);
  return status == kEploadNpuDone;
}

std::vector<int64_t> ranks_hccl(c10d::Backend& backend) {
  std::vector<uint32_t> ranks(backend.getSize());
  TORCH_CHECK_VALUE(
      npu::library().ranks != nullptr &&
          npu::library().ranks(&backend, ranks.data(), static_cast<uint32_t>(ranks.size())),
      "epload: a group of HCCL's does not say which global ranks it holds, and this build lacks the part that asks "
      "torch_npu; rebuild epload with EPLOAD_NPU=1");
  return {ranks.begin(), ranks.end()};
}

} // namespace epload
