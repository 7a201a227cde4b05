#include "coalesced_bcast.h"

#include "bucket_plan.h"
#include "collective.h"
#include "region_copy.h"
#include "stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kAlignment = 16; // the widest device access; also divides every dtype's size

// Where this rank stands: which steps it takes part in, and from whom.
struct Route {
  Group inter;
  Group intra;
  bool source = true; // this rank's tensors are what is sent
  int64_t src = 0;
  int64_t leader = 0;

  Route(
      c10::DeviceType device,
      int64_t src_rank,
      const std::string& inter_group,
      const std::string& intra_group,
      bool flat,
      int64_t leader_rank)
      : inter(inter_group, device), intra(intra_group, device), src(src_rank) {
    TORCH_CHECK_VALUE(
        !flat || !intra.present(),
        "coalesced_bcast: algorithm 'flat' takes one group of all ranks as inter_group and no intra_group, got '",
        intra_group,
        "'");
    if (!inter.present() && !intra.present()) {
      TORCH_CHECK_VALUE(src >= 0, "coalesced_bcast: expected src as a global rank, got ", src);
      return; // a job of one rank
    }
    const int64_t self = inter.present() ? inter.self() : intra.self();
    source = src == self;
    TORCH_CHECK_VALUE(
        !inter.present() || inter.contains(src),
        "coalesced_bcast: src ",
        src,
        " is not in inter_group '",
        inter_group,
        "' of ranks ",
        inter.ranks());
    if (!intra.present()) {
      leader = self;
      return;
    }
    const auto& node = intra.ranks();
    const bool own_node = intra.contains(src);
    leader = leader_rank >= 0 ? leader_rank : own_node ? src : *std::min_element(node.begin(), node.end());
    TORCH_CHECK_VALUE(
        intra.contains(leader),
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
        own_node || inter.present() == (leader == self),
        "coalesced_bcast: rank ",
        self,
        inter.present() ? " has an inter_group but leader " : " leads its node but has no inter_group; leader ",
        leader,
        " leads its node; pass leader= the rank of this node that is in the leaders' group");
  }

  void broadcast(const at::Tensor& flat) const {
    inter.broadcast(flat, src); // leaders first: a node's step would otherwise spread what the leader does not have yet
    intra.broadcast(flat, leader);
  }
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

} // namespace

void coalesced_bcast(
    at::TensorList tensors,
    int64_t src,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t bucket_bytes,
    const std::string& algorithm,
    std::optional<c10::Stream> stream,
    int64_t leader) {
  TORCH_CHECK_VALUE(
      algorithm == "two_level" || algorithm == "flat",
      "coalesced_bcast: expected algorithm 'two_level' or 'flat', got '",
      algorithm,
      "'");
  TORCH_CHECK_VALUE(
      bucket_bytes >= kAlignment && bucket_bytes <= (int64_t{1} << 60),
      "coalesced_bcast: expected bucket_bytes from ",
      kAlignment,
      " to 2**60, got ",
      bucket_bytes);
  if (tensors.empty()) {
    return;
  }
  const auto device = check_tensors(tensors);
  ExplicitStream::check(device, stream);
  const Route route(device.type(), src, inter_group, intra_group, algorithm == "flat", leader);
  if (!route.inter.present() && !route.intra.present()) {
    return;
  }

  std::vector<TensorExtent> extents;
  extents.reserve(tensors.size());
  for (const auto& t : tensors) {
    extents.push_back(extent_of(t.sizes().data(), t.dim(), static_cast<int64_t>(t.element_size()), bucket_bytes));
  }
  const auto plan = plan_buckets(extents, bucket_bytes, kAlignment, /*header=*/0);

  const at::NoGradGuard no_grad;
  const ExplicitStream on_stream(device, stream);
  at::Tensor staging; // allocated on our stream, reused by every bucket
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
      if (route.source) {
        region_copy(bucket, tensors, copies, Direction::kPack);
      }
      route.broadcast(bucket);
      if (!route.source) {
        region_copy(bucket, tensors, copies, Direction::kUnpack);
      }
    }
    begin = end;
  }
}

} // namespace epload
