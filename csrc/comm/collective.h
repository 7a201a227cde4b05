// The only interface to communicators: c10d process groups, resolved by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace epload {

using Work = c10::intrusive_ptr<c10d::Work>;

// A c10d group as seen by one rank of it. An empty name makes an absent group, which has no ranks and no steps.
class Group {
 public:
  // Throws ValueError when no group has that name, or when it has no backend for `device`.
  Group(const std::string& name, c10::DeviceType device);

  bool present() const {
    return group_ != nullptr;
  }
  // Global ranks in group-rank order. A group that c10d records no ranks for (the default group) is 0..size-1.
  const std::vector<int64_t>& ranks() const {
    return ranks_;
  }
  bool contains(int64_t global_rank) const;
  int64_t self() const; // this process's global rank

  // Broadcasts `flat` (contiguous bytes) from `global_root` on the current stream, in c10d's synchronous mode. On a
  // device the host does not wait; over gloo it does. HCCL's process group has no such mode: libepload_npu calls HCCL
  // itself.
  void broadcast(const at::Tensor& flat, int64_t global_root) const;

  // Gathers the equal parts of `flat` (contiguous bytes) in place, part i from the i-th rank of the group; otherwise as
  // broadcast(). Over HCCL, which does not say that its all-gather may work in place, each part is broadcast.
  void all_gather(const at::Tensor& flat) const;

  // Starts to send contiguous bytes to, or to receive them from, another rank of the group. Messages between two ranks
  // arrive in the order they were sent. The memory must live until the work is complete. Throws ValueError when `peer`
  // (a global rank) is not in the group.
  Work send(const at::Tensor& flat, int64_t peer) const;
  Work receive(const at::Tensor& flat, int64_t peer) const;

  // Whether a broadcast over this group is better done as a relay: gloo's own sends ceil(log2(size)) full copies from
  // its root, one after another; NCCL's and HCCL's are pipelined already, and the relay moves host memory only.
  bool relays() const {
    return gloo_;
  }

 private:
  int rank_in_group(int64_t global_rank) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<int64_t> ranks_;
  c10::intrusive_ptr<c10d::Backend> hccl_; // null for other backends
  bool gloo_ = false;
};

} // namespace epload
