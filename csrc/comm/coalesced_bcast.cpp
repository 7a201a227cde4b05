// The coalesced two-level broadcast: checks, bucket plan, and per bucket pack -> leaders -> node -> unpack on one
// stream.
#include "../bucket_plan.h"
#include "../region_copy.h"
#include "../schedule.h"
#include "../tensor_memory.h"
#include "collective.h"
#include "relay.h"
#include "stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace epload {
namespace {

// Where this rank stands, and the groups over which it sends and receives.
class Route {
 public:
  Route(
      c10::DeviceType device,
      int64_t src,
      const std::string& inter_group,
      const std::string& intra_group,
      Algorithm algorithm,
      int64_t leader)
      : inter_(inter_group, device), intra_(intra_group, device) {
    if (!inter_.present() && !intra_.present()) {
      TORCH_CHECK_VALUE(src >= 0, "coalesced_bcast: expected src as a global rank, got ", src);
      return; // a job of one rank
    }
    const int64_t self = inter_.present() ? inter_.self() : intra_.self();
    position_ = {inter_.ranks(), intra_.ranks(), self, src, self, algorithm};
    if (is_striped(algorithm)) {
      check_striped(leader);
    } else {
      check_leaders(inter_group, intra_group, leader);
    }
  }

  bool alone() const {
    return !inter_.present() && !intra_.present();
  }

  // Whether this rank's tensors are what is sent.
  bool source() const {
    return position_.self == position_.src;
  }

  // Copies the source's bytes to every rank.
  void broadcast(const at::Tensor& flat) const {
    if ((inter_.present() ? inter_ : intra_).relays()) {
      relay(flat, relay_steps(position_, flat.numel(), kOpAlignment), inter_, intra_, kRelayChunk);
      return;
    }
    for (const auto& step : broadcast_steps(position_, flat.numel(), kOpAlignment)) {
      const auto& group = step.inter ? inter_ : intra_;
      const auto part = flat.narrow(0, step.begin, step.end - step.begin);
      if (step.root == kNoRank) {
        group.all_gather(part);
      } else {
        group.broadcast(part, step.root);
      }
    }
  }

 private:
  static constexpr int64_t kRelayChunk = 1 << 20; // 8 ms of a 1 Gbit link; smaller ones cost more in calls than in fill

  void check_leaders(const std::string& inter_group, const std::string& intra_group, int64_t given_leader) {
    auto& [inter, node, self, src, leader, algorithm] = position_;
    TORCH_CHECK_VALUE(
        !inter_.present() || inter_.contains(src),
        "coalesced_bcast: src ",
        src,
        " is not in inter_group '",
        inter_group,
        "' of ranks ",
        inter);
    if (!intra_.present()) {
      return;
    }
    const bool own_node = intra_.contains(src);
    leader = given_leader >= 0 ? given_leader : leader_of(node, src);
    TORCH_CHECK_VALUE(
        intra_.contains(leader),
        "coalesced_bcast: leader ",
        leader,
        " is not in intra_group '",
        intra_group,
        "' of ranks ",
        node);
    TORCH_CHECK_VALUE(
        !own_node || leader == src,
        "coalesced_bcast: src ",
        src,
        " is on this node, so it leads it; got leader ",
        leader);
    TORCH_CHECK_VALUE(
        own_node || inter_.present() == (leader == self),
        "coalesced_bcast: rank ",
        self,
        inter_.present() ? " has an inter_group but leader " : " leads its node but has no inter_group; leader ",
        leader,
        " leads its node; pass leader= the rank of this node that is in the leaders' group");
  }

  void check_striped(int64_t given_leader) {
    const auto src = position_.src;
    if (!inter_.present()) {
      TORCH_CHECK_VALUE(
          intra_.contains(src), "coalesced_bcast: src ", src, " is not in the only group, of ranks ", intra_.ranks());
      return; // one node
    }
    position_.leader = inter_.contains(src) ? src : given_leader;
    TORCH_CHECK_VALUE(
        inter_.contains(position_.leader) && (position_.leader == position_.self) == position_.on_source_node(),
        "coalesced_bcast: algorithm 'striped' takes as leader the rank of the source's node that is on this rank's "
        "rail ",
        inter_.ranks(),
        ", got ",
        given_leader);
  }

  Group inter_, intra_;
  Position position_{};
};

c10::Device check_tensors(at::TensorList tensors) {
  const auto device = tensors[0].device();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    check_memory("coalesced_bcast", t, i);
    TORCH_CHECK_VALUE(
        t.device() == device,
        "coalesced_bcast: expected all tensors on one device, tensor 0 is on ",
        device,
        " and tensor ",
        i,
        " on ",
        t.device());
  }
  return device;
}

// The box of a row-major tensor that a slot covers; see TensorExtent for why it is one.
RegionCopy region_of(const Slot& slot, const at::Tensor& tensor, int64_t index) {
  const auto ndim = static_cast<size_t>(tensor.dim());
  RegionCopy copy{index, slot.bucket_offset, tensor.scalar_type(), Dims(ndim, 0), Dims(tensor.sizes()), Dims(ndim, 0)};
  const auto item = static_cast<int64_t>(tensor.element_size());
  int64_t at = slot.tensor_offset / item;
  const int64_t count = slot.nbytes / item;
  int64_t inner = 1; // elements of one index of dim d
  for (size_t d = ndim; d-- > 0;) {
    copy.bucket_stride[d] = inner;
    inner *= tensor.size(static_cast<int64_t>(d));
  }
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t step = copy.bucket_stride[d];
    copy.start[d] = at / step;
    at %= step;
    copy.size[d] = std::clamp<int64_t>(count / step, 1, tensor.size(static_cast<int64_t>(d)));
  }
  return copy;
}

at::Tensor as_bytes(const at::Tensor& tensor, const Slot& slot) {
  // Not view({-1}): a contiguous tensor may have any stride in a dim of length 1, and view keeps it.
  const auto flat = at::as_strided(tensor, {tensor.numel()}, {1}, tensor.storage_offset());
  return flat.view(at::kByte).narrow(0, slot.tensor_offset, slot.nbytes);
}

BucketPlan plan_of(at::TensorList tensors, int64_t bucket_bytes) {
  std::vector<TensorExtent> extents;
  extents.reserve(tensors.size());
  for (const auto& t : tensors) {
    extents.push_back(extent_of(t.sizes().data(), t.dim(), static_cast<int64_t>(t.element_size()), bucket_bytes));
  }
  return plan_buckets(extents, bucket_bytes, kOpAlignment, /*header=*/0);
}

// Broadcasts all buckets, each packed into and unpacked from one staging buffer, unless a part of one tensor is all
// that is in it.
void broadcast_buckets(at::TensorList tensors, const BucketPlan& plan, const Route& route, c10::Device device) {
  at::Tensor staging; // allocated on the current stream, reused by every bucket
  const auto& slots = plan.slots;
  for (size_t begin = 0; begin < slots.size();) {
    size_t end = begin + 1;
    while (end < slots.size() && slots[end].bucket == slots[begin].bucket) {
      ++end;
    }
    const auto& first = slots[begin];
    if (end == begin + 1 && tensors[first.tensor].is_contiguous()) {
      route.broadcast(as_bytes(tensors[first.tensor], first)); // in place: the tensor is the bucket
    } else {
      std::vector<RegionCopy> copies;
      copies.reserve(end - begin);
      for (size_t i = begin; i < end; ++i) {
        copies.push_back(region_of(slots[i], tensors[slots[i].tensor], slots[i].tensor));
      }
      if (!staging.defined()) {
        const auto largest = std::max_element(plan.bucket_nbytes.begin(), plan.bucket_nbytes.end());
        staging = at::empty({*largest}, at::TensorOptions().dtype(at::kByte).device(device));
      }
      const auto bucket = staging.narrow(0, 0, plan.bucket_nbytes[first.bucket]);
      if (route.source()) {
        region_copy(bucket, tensors, copies, Direction::kPack);
      }
      route.broadcast(bucket);
      if (!route.source()) {
        region_copy(bucket, tensors, copies, Direction::kUnpack);
      }
    }
    begin = end;
  }
}

// Collective over the ranks of both groups; every rank passes the same number of tensors, of the same dtypes and sizes,
// in the same order. `src` is a global rank. `inter_group` has one leader per node, `src` among them, and is empty on a
// rank that leads no node; `intra_group` has this node's ranks and is empty if there is only one. `leader` is the
// global rank of this node's leader; -1 derives it: `src` on its own node, elsewhere the node's lowest rank. With
// "striped", `inter_group` is this rank's rail, on which is the rank of every node that comes at the same place in its
// `intra_group`, and `leader` the one of the source's node.
// Throws ValueError before anything has moved.
void coalesced_bcast(
    at::TensorList tensors,
    int64_t src,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t bucket_bytes,
    const std::string& algorithm_name,
    std::optional<c10::Stream> stream,
    int64_t leader) {
  Algorithm algorithm{};
  try {
    algorithm = algorithm_of(algorithm_name);
  } catch (const std::invalid_argument& e) { // which not every torch makes a ValueError
    TORCH_CHECK_VALUE(false, e.what());
  }
  TORCH_CHECK_VALUE(
      bucket_bytes >= kOpAlignment && bucket_bytes <= (int64_t{1} << 60),
      "coalesced_bcast: expected bucket_bytes from ",
      kOpAlignment,
      " to 2**60, got ",
      bucket_bytes);
  if (tensors.empty()) {
    return;
  }
  const auto device = check_tensors(tensors);
  ExplicitStream::check(device, stream);
  const Route route(device.type(), src, inter_group, intra_group, algorithm, leader);
  if (!route.alone()) {
    const auto plan = plan_of(tensors, bucket_bytes);
    const at::NoGradGuard no_grad;
    const ExplicitStream on_stream(device, stream);
    mark_written(tensors);
    broadcast_buckets(tensors, plan, route, device);
  }
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("coalesced_bcast", TORCH_FN(epload::coalesced_bcast));
}
