#include "broadcast.h"

#include "../beside.h"
#include "api.h"

namespace epload {
namespace {

struct Library {
  decltype(&epload_npu_broadcast) broadcast = nullptr; // null in a build without it
  decltype(&epload_npu_ranks) ranks = nullptr;
};

Library open_library() {
  const Beside beside(
      "libepload_npu.so",
      "epload_npu_interface",
      kEploadNpuInterface,
      "; rebuild epload with EPLOAD_NPU=1 against the torch_npu that runs");
  Library library;
  if (beside.present()) {
    beside.find(library.broadcast, "epload_npu_broadcast");
    beside.find(library.ranks, "epload_npu_ranks");
  }
  return library;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

} // namespace

bool broadcast_hccl(c10d::Backend& backend, const at::Tensor& flat, int root) {
  if (library().broadcast == nullptr) {
    return false;
  }
  const int status =
      library().broadcast(&backend, flat.data_ptr(), static_cast<uint64_t>(flat.nbytes()), static_cast<uint32_t>(root));
  TORCH_CHECK(status == kEploadNpuDone || status == kEploadNpuNotYet, "epload: HcclBroadcast failed with ", status);
  return status == kEploadNpuDone;
}

std::vector<int64_t> ranks_hccl(c10d::Backend& backend) {
  std::vector<uint32_t> ranks(backend.getSize());
  TORCH_CHECK_VALUE(
      library().ranks != nullptr && library().ranks(&backend, ranks.data(), static_cast<uint32_t>(ranks.size())),
      "epload: a group of HCCL's does not say which global ranks it holds, and this build lacks the part that asks "
      "torch_npu; rebuild epload with EPLOAD_NPU=1");
  return {ranks.begin(), ranks.end()};
}

} // namespace epload
