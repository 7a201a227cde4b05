#include "broadcast.h"

#include "../sibling_library.h"

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace epload {

const NpuLibrary& npu_library() {
  static const NpuLibrary opened = [] {
    const SiblingLibrary sibling(
        "libepload_npu.so",
        "epload_npu_interface",
        kEploadNpuInterface,
        "; rebuild epload with EPLOAD_NPU=1 against the torch_npu that runs");
    NpuLibrary library;
    if (sibling.present()) {
      sibling.find(library.broadcast, "epload_npu_broadcast");
      sibling.find(library.ranks, "epload_npu_ranks");
      sibling.find(library.abort, "epload_npu_abort");
      sibling.find(library.plain, "epload_npu_plain");
      sibling.find(library.copy, "epload_npu_copy");
    }
    return library;
  }();
  return opened;
}

bool has_plain_format(const at::Tensor& tensor) {
  return npu_library().plain == nullptr || npu_library().plain(tensor.storage().unsafeGetStorageImpl());
}

void broadcast_hccl(c10d::Backend& backend, const at::Tensor& flat, int root) {
  EploadNpuError error;
  const int status = npu_library().broadcast(
      &backend, flat.data_ptr(), static_cast<uint64_t>(flat.nbytes()), static_cast<uint32_t>(root), &error);
  TORCH_CHECK(status != kEploadNpuThrew, "epload: HcclBroadcast on ", flat.device(), " failed: ", error.text);
  TORCH_CHECK(status == kEploadNpuDone, "epload: HcclBroadcast on ", flat.device(), " failed with ", status);
}

std::vector<int64_t> ranks_hccl(c10d::Backend& backend) {
  auto* const ask = npu_library().ranks;
  TORCH_CHECK_VALUE(
      ask != nullptr,
      "epload: a group of HCCL's does not say which global ranks it holds, and this build lacks the part that asks "
      "torch_npu; rebuild epload with EPLOAD_NPU=1");
  std::vector<uint32_t> ranks(backend.getSize());
  EploadNpuError error;
  const int status = ask(&backend, ranks.data(), static_cast<uint32_t>(ranks.size()), &error);
  TORCH_CHECK(status == kEploadNpuDone, "epload: torch_npu does not say the ranks of a group of HCCL's: ", error.text);
  return {ranks.begin(), ranks.end()};
}

namespace {

// See ops.py.
bool abort_hccl(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (npu_library().abort == nullptr) {
    return false;
  }
  EploadNpuError error;
  const int status = npu_library().abort(group->getBackend(c10::DeviceType::PrivateUse1).get(), &error);
  TORCH_CHECK(status == kEploadNpuDone, "epload: the abort of a group of HCCL's failed: ", error.text);
  return true;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("abort_hccl", TORCH_FN(epload::abort_hccl));
}
