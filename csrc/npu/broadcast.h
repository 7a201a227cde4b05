// libepload_npu as libepload sees it, and broadcasts over HCCL on the current stream. torch_npu's process group has no
// such mode: it uses its own stream and synchronizes with it by events.
#pragma once

#include "api.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

namespace epload {

struct NpuLibrary {
  decltype(&epload_npu_broadcast) broadcast = nullptr; // all null in a build without it
  decltype(&epload_npu_ranks) ranks = nullptr;
  decltype(&epload_npu_abort) abort = nullptr;
  decltype(&epload_npu_plain) plain = nullptr;
  decltype(&epload_npu_copy) copy = nullptr;
};

// Opened by the first call. Throws c10::Error when it is there but does not load.
const NpuLibrary& npu_library();

// Returns false for a tensor on an NPU whose elements are not where its strides say. True if libepload_npu is not in
// this build.
bool has_plain_format(const at::Tensor& tensor);

// Broadcasts contiguous bytes from rank `root` of the group, of which ranks_hccl() knows, on the current stream of
// their device. Throws c10::Error if HCCL fails.
void broadcast_hccl(c10d::Backend& backend, const at::Tensor& flat, int root);

// Global ranks of an HCCL group, which its backend exposes only to torch_npu's own code. Throws ValueError if
// libepload_npu is not in this build.
std::vector<int64_t> ranks_hccl(c10d::Backend& backend);

} // namespace epload
