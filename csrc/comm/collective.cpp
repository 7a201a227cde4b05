#include "collective.h"

#include "../npu/broadcast.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <numeric>

namespace epload {
namespace {

// "epld": messages of the caller's on the same group have others, by default 0, or would get our bytes.
constexpr int kTag = 0x65706c64;

// NCCL's synchronous mode returns no work: the step is already ordered on the current stream.
void wait_for(const Work& work) {
  if (work) {
    work->wait();
  }
}

} // namespace

Group::Group(const std::string& name, c10::DeviceType device) {
  if (name.empty()) {
    return;
  }
  try {
    group_ = c10d::resolve_process_group(name);
  } catch (const c10::Error& e) {
    TORCH_CHECK_VALUE(
        false,
        "coalesced_bcast: expected the name of a process group of this rank, got '",
        name,
        "' (",
        e.what_without_backtrace(),
        ")");
  }
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group_->getBackend(device);
  } catch (const std::exception& e) {
    TORCH_CHECK_VALUE(
        false,
        "coalesced_bcast: group '",
        name,
        "' has no backend for ",
        c10::DeviceTypeName(device, /*lower_case=*/true),
        " tensors; make it with one, e.g. init_process_group('cpu:gloo,cuda:nccl')");
  }
  if (backend->getBackendName() == "hccl") {
    hccl_ = backend;
    ranks_ = ranks_hccl(*backend);
    return;
  }
  try {
    for (const auto rank : backend->getBackendOptions()->global_ranks_in_group) {
      ranks_.push_back(static_cast<int64_t>(rank));
    }
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(
        false,
        "coalesced_bcast: the backend of group '",
        name,
        "' does not say which global ranks it holds (Backend::getBackendOptions)");
  }
  gloo_ = device == c10::kCPU && backend->getBackendName() == "gloo";
  if (ranks_.empty()) {
    ranks_.resize(group_->getSize());
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
}

bool Group::contains(int64_t global_rank) const {
  return std::find(ranks_.begin(), ranks_.end(), global_rank) != ranks_.end();
}

int64_t Group::self() const {
  return ranks_.at(group_->getRank());
}

void Group::broadcast(const at::Tensor& flat, int64_t global_root) const {
  const int root = rank_in_group(global_root);
  if (hccl_ != nullptr) {
    broadcast_hccl(*hccl_, flat, root);
    return;
  }
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{flat};
  wait_for(group_->broadcast(tensors, options));
}

void Group::all_gather(const at::Tensor& flat) const {
  const auto count = static_cast<int64_t>(ranks_.size());
  const int64_t each = flat.numel() / count;
  if (hccl_ != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      broadcast(flat.narrow(0, i * each, each), ranks_[i]);
    }
    return;
  }
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  at::Tensor whole = flat, own = flat.narrow(0, group_->getRank() * each, each);
  wait_for(group_->_allgather_base(whole, own, options));
}

Work Group::send(const at::Tensor& flat, int64_t peer) const {
  const auto to = rank_in_group(peer); // first, as an absent group has no ranks
  std::vector<at::Tensor> tensors{flat};
  return group_->send(tensors, to, kTag);
}

Work Group::receive(const at::Tensor& flat, int64_t peer) const {
  const auto from = rank_in_group(peer);
  std::vector<at::Tensor> tensors{flat};
  return group_->recv(tensors, from, kTag);
}

int Group::rank_in_group(int64_t global_rank) const {
  const auto at = std::find(ranks_.begin(), ranks_.end(), global_rank);
  TORCH_CHECK_VALUE(at != ranks_.end(), "expected a rank of the group of ranks ", ranks_, ", got ", global_rank);
  return static_cast<int>(at - ranks_.begin());
}

} // namespace epload
