// The one seam to a communicator: c10d process groups, resolved by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace epload {

// A c10d group as seen by one rank of it. An empty name makes an absent group, in which every step is a no-op.
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
  // device the host does not wait; over gloo it does.
  void broadcast(const at::Tensor& flat, int64_t global_root) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<int64_t> ranks_;
};

} // namespace epload
