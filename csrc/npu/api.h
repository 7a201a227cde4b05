// The C interface of libepload_npu, which libepload opens at the first tensor on an NPU or the first HCCL group. Only
// libepload_npu links torch_npu and CANN.
#pragma once

#include <climits>
#include <cstdint>

namespace c10 {
struct StorageImpl;
}
namespace c10d {
class Backend;
}

constexpr uint32_t kEploadNpuInterface = 6; // raised when a signature below changes

enum EploadNpuStatus : int { kEploadNpuDone = 0, kEploadNpuThrew = INT_MIN };

// What torch_npu or CANN threw. No exception leaves the functions below, as they may be compiled by another compiler
// than their caller.
struct EploadNpuError {
  char text[1024]; // null-terminated; valid only after kEploadNpuThrew
};

struct EploadNpuCopy {
  void* to;
  const void* from;
  uint64_t nbytes;
};

extern "C" {
uint32_t epload_npu_interface() noexcept;

// HcclBroadcast of `nbytes` at `data` (memory of the current device) from rank `root` of `backend`'s group, on the
// current stream, with the group's own communicator, which the first one makes. The host waits for that only.
// kEploadNpuDone, kEploadNpuThrew, or HCCL's error code.
int epload_npu_broadcast(
    c10d::Backend* backend, void* data, uint64_t nbytes, uint32_t root, EploadNpuError* error) noexcept;

// Writes the global ranks of `backend`'s group, `size` of them, in group-rank order. kEploadNpuDone or kEploadNpuThrew.
int epload_npu_ranks(c10d::Backend* backend, uint32_t* ranks, uint32_t size, EploadNpuError* error) noexcept;

// Ends what `backend`'s communicators do. c10d's Backend::abort() does not reach torch_npu's. kEploadNpuDone or
// kEploadNpuThrew.
int epload_npu_abort(c10d::Backend* backend, EploadNpuError* error) noexcept;

// Whether a storage's elements lie where strides say, and not in one of Ascend's own formats.
bool epload_npu_plain(const c10::StorageImpl* storage) noexcept;

// Copies within the current device, on the current stream. The host does not wait. kEploadNpuDone, kEploadNpuThrew, or
// CANN's error code.
int epload_npu_copy(const EploadNpuCopy* copies, uint64_t count, EploadNpuError* error) noexcept;
}
