// The interface of libepload_npu, which libepload opens when it first meets an NPU's tensors or a group of HCCL's:
// torch, torch_npu and CANN on its side, none of torch_npu or CANN on ours.
#pragma once

#include <cstdint>

namespace c10 {
struct StorageImpl;
}
namespace c10d {
class Backend;
}

constexpr uint32_t kEploadNpuInterface = 2; // raised when a signature below changes

enum EploadNpuStatus : int { kEploadNpuDone = 0, kEploadNpuNotYet = -1 };

struct EploadNpuCopy {
  void* to;
  const void* from;
  uint64_t nbytes;
};

extern "C" {
uint32_t epload_npu_interface();

// HcclBroadcast of `nbytes` at `data` (memory of the current device) from rank `root` of `backend`'s group, on the
// current stream, with the group's own communicator. The host does not wait. kEploadNpuNotYet: the backend is not
// torch_npu's, or has no communicator for this device yet, and nothing was queued; otherwise HCCL's error code.
int epload_npu_broadcast(c10d::Backend* backend, void* data, uint64_t nbytes, uint32_t root);

// Writes the global ranks of `backend`'s group, `size` of them, in group-rank order. False if it is not torch_npu's.
bool epload_npu_ranks(c10d::Backend* backend, uint32_t* ranks, uint32_t size);

// Whether a storage's elements lie where strides say, and not in one of Ascend's own formats.
bool epload_npu_plain(const c10::StorageImpl* storage);

// Copies within the current device, on the current stream. The host does not wait. Returns CANN's error code.
int epload_npu_copy(const EploadNpuCopy* copies, uint64_t count);
}
