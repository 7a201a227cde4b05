// Broadcasts over HCCL on the current stream, which torch_npu's process group does not offer: it has a stream of its
// own and hops to it and back by events.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

namespace epload {

// Broadcasts contiguous bytes from rank `root` of the group on the current stream of their device. False if that was
// not possible and nothing was queued: libepload_npu is not in this build, or the group has no communicator yet, which
// its first broadcast makes. Throws c10::Error when HCCL refuses.
bool broadcast_hccl(c10d::Backend& backend, const at::Tensor& flat, int root);

// Global ranks of an HCCL group, which its backend tells nobody but torch_npu's own code. Throws ValueError where
// libepload_npu is not in this build.
std::vector<int64_t> ranks_hccl(c10d::Backend& backend);

} // namespace epload
