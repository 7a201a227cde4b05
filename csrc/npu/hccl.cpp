// libepload_npu: a broadcast of HCCL's, literally on the current stream. Linked against torch_npu, which brings CANN.
#include "api.h"

#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/distributed/ProcessGroupHCCL.hpp>

#include <algorithm>
#include <numeric>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

EPLOAD_EXPORT uint32_t epload_npu_interface() {
  return kEploadNpuInterface;
}

EPLOAD_EXPORT int epload_npu_broadcast(c10d::Backend* backend, void* data, uint64_t nbytes, uint32_t root) {
  auto* const group = dynamic_cast<c10d_npu::ProcessGroupHCCL*>(backend);
  if (group == nullptr) {
    return kEploadNpuNotYet;
  }
  const auto stream = c10_npu::getCurrentNPUStream();
  const auto communicator = group->tryGetHcclComm(stream.device_index());
  if (communicator == nullptr) {
    return kEploadNpuNotYet;
  }
  // stream() first hands over what torch_npu's task queue still holds for the device, so that the order is the
  // program's.
  return HcclBroadcast(data, nbytes, HCCL_DATA_TYPE_UINT8, root, communicator->getHcclComm(), stream.stream());
}

EPLOAD_EXPORT bool epload_npu_ranks(c10d::Backend* backend, uint32_t* ranks, uint32_t size) {
  const auto* const group = dynamic_cast<c10d_npu::ProcessGroupHCCL*>(backend);
  if (group == nullptr) {
    return false;
  }
  const auto& known = group->groupRanks();
  if (known.empty()) { // the default group
    std::iota(ranks, ranks + size, 0U);
    return true;
  }
  std::copy_n(known.begin(), std::min<size_t>(known.size(), size), ranks);
  return known.size() == size;
}
