#include "coalesced_bcast.h"

#include "bucket_plan.h"
#include "collective.h"
#include "region_copy.h"
#include "relay.h"
#include "stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kAlignment = 16; // the widest device access; also divides every dtype's size

enum class Algorithm { kTwoLevel, kStriped, kFlat };

Algorithm algorithm_of(const std::string& name) {
  if (name == "two_level") {
    return Algorithm::kTwoLevel;
  }
  if (name == "striped") {
    return Algorithm::kStriped;
  }
  TORCH_CHECK_VALUE(
      name == "flat", "coalesced_bcast: expected algorithm 'two_level', 'striped' or 'flat', got '", name, "'");
  return Algorithm::kFlat;
}

// Where this rank stands: which steps it takes part in, and from whom.
struct Route {
  Group inter;
  Group intra;
  Algorithm algorithm;
  bool source = true; // this rank's tensors are what is sent
  int64_t self = 0;
  int64_t src = 0;
  int64_t leader = 0; // of this node; of this rank's rail when striped

  Route(
      c10::DeviceType device,
      int64_t src_rank,
      const std::string& inter_group,
      const std::string& intra_group,
      Algorithm wanted,
      int64_t leader_rank)
      : inter(inter_group, device), intra(intra_group, device), algorithm(wanted), src(src_rank) {
    TORCH_CHECK_VALUE(
        algorithm != Algorithm::kFlat || !intra.present(),
        "coalesced_bcast: algorithm 'flat' takes one group of all ranks as inter_group and no intra_group, got '",
        intra_group,
        "'");
    if (!inter.present() && !intra.present()) {
      TORCH_CHECK_VALUE(src >= 0, "coalesced_bcast: expected src as a global rank, got ", src);
      return; // a job of one rank
    }
    self = inter.present() ? inter.self() : intra.self();
    source = src == self;
    leader = self;
    if (algorithm == Algorithm::kStriped) {
      check_striped(leader_rank);
    } else {
      check_leaders(inter_group, intra_group, leader_rank);
    }
  }

  // Makes the source's bytes everybody's.
  void broadcast(const at::Tensor& flat) const {
    if (algorithm != Algorithm::kFlat && (inter.present() ? inter : intra).relays()) {
      const auto steps = algorithm == Algorithm::kStriped ? striped_steps(flat.numel()) : leader_steps(flat.numel());
      relay(flat, steps, inter, intra, kRelayChunk);
    } else if (algorithm == Algorithm::kStriped) {
      broadcast_striped(flat);
    } else {
      inter.broadcast(flat, src); // leaders first: a node's step would otherwise spread what its leader lacks
      intra.broadcast(flat, leader);
    }
  }

 private:
  static constexpr int64_t kRelayChunk = 1 << 20; // 8 ms of a 1 Gbit link; smaller ones cost more in calls than in fill

  void check_leaders(const std::string& inter_group, const std::string& intra_group, int64_t leader_rank) {
    TORCH_CHECK_VALUE(
        !inter.present() || inter.contains(src),
        "coalesced_bcast: src ",
        src,
        " is not in inter_group '",
        inter_group,
        "' of ranks ",
        inter.ranks());
    if (!intra.present()) {
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

  void check_striped(int64_t leader_rank) {
    if (!inter.present()) {
      TORCH_CHECK_VALUE(
          intra.contains(src), "coalesced_bcast: src ", src, " is not in the only group, of ranks ", intra.ranks());
      return; // one node
    }
    leader = inter.contains(src) ? src : leader_rank;
    TORCH_CHECK_VALUE(
        inter.contains(leader) && (leader == self) == on_source_node(),
        "coalesced_bcast: algorithm 'striped' takes as leader the rank of the source's node that is on this rank's "
        "rail ",
        inter.ranks(),
        ", got ",
        leader_rank);
  }

  bool on_source_node() const {
    return source || intra.contains(src);
  }

  // The whole of a bucket as one step of a chain: through the leaders, and from each leader through its node.
  std::vector<RelayStep> leader_steps(int64_t nbytes) const {
    RelayStep step{0, nbytes, -1, -1, -1, -1};
    std::tie(step.from_inter, step.to_inter) = neighbors(inter, src);
    std::tie(step.from_intra, step.to_intra) = neighbors(intra, leader);
    return {step};
  }

  // On the source's node every stripe goes along a chain from the source, and its rank passes it on over its rail; on
  // the others it goes from that rank around the node. A chunk of each stripe in turn, so that all rails and the node
  // are busy at once.
  std::vector<RelayStep> striped_steps(int64_t nbytes) const {
    const Stripes stripes = stripes_of(nbytes);
    const bool source_node = on_source_node();
    const auto [from_inter, to_inter] = neighbors(inter, leader);
    const auto [before, after] = source_node ? neighbors(intra, src) : around();
    std::vector<RelayStep> steps;
    for (int64_t at = 0; at < stripes.each; at += kRelayChunk) {
      for (int64_t i = 0; i < stripes.count; ++i) {
        const int64_t k = source_node ? i : (stripes.mine - i + stripes.count) % stripes.count;
        const auto [low, high] = stripes.range(k);
        RelayStep step{low + at, std::min(high, low + at + kRelayChunk), -1, -1, -1, -1};
        if (step.begin >= step.end) {
          continue;
        }
        if (source_node) {
          step.from_intra = before;
          step.to_intra = after;
          step.to_inter = k == stripes.mine ? to_inter : -1;
        } else {
          (i == 0 ? step.from_inter : step.from_intra) = i == 0 ? from_inter : before;
          step.to_inter = i == 0 ? to_inter : -1;
          step.to_intra = i + 1 < stripes.count ? after : -1;
        }
        steps.push_back(step);
      }
    }
    return steps;
  }

  // Equal parts of a bucket, one for each rank of a node; the last ones may be short or empty.
  struct Stripes {
    int64_t nbytes, each, count, mine;

    std::pair<int64_t, int64_t> range(int64_t k) const {
      const int64_t begin = std::min(nbytes, k * each);
      return {begin, std::min(nbytes, begin + each)};
    }
  };

  Stripes stripes_of(int64_t nbytes) const {
    const auto& node = intra.ranks();
    if (!intra.present()) {
      return {nbytes, nbytes, 1, 0};
    }
    const auto count = static_cast<int64_t>(node.size());
    const int64_t each = (nbytes / count + kAlignment) / kAlignment * kAlignment;
    return {nbytes, each, count, std::find(node.begin(), node.end(), self) - node.begin()};
  }

  // The ranks before and after this one in a ring of its node; -1 for none.
  std::pair<int64_t, int64_t> around() const {
    const auto& node = intra.ranks();
    if (!intra.present()) {
      return {-1, -1};
    }
    const auto count = node.size();
    const size_t at = std::find(node.begin(), node.end(), self) - node.begin();
    return {node[(at + count - 1) % count], node[(at + 1) % count]};
  }

  // The ranks before and after this one in a chain through the group that starts at `first`; -1 for none.
  std::pair<int64_t, int64_t> neighbors(const Group& group, int64_t first) const {
    if (!group.present()) {
      return {-1, -1};
    }
    auto ranks = group.ranks();
    std::rotate(ranks.begin(), std::find(ranks.begin(), ranks.end(), first), ranks.end());
    const auto at = std::find(ranks.begin(), ranks.end(), self);
    return {at == ranks.begin() ? -1 : *(at - 1), at + 1 == ranks.end() ? -1 : *(at + 1)};
  }

  // The source's node first has the whole bucket; each of its ranks sends its stripe over its rail; the other nodes
  // then put their stripes together. The source's node needs all bytes anyway, so a scatter and gather there would save
  // nothing over one broadcast.
  void broadcast_striped(const at::Tensor& flat) const {
    const Stripes stripes = stripes_of(flat.numel());
    const auto stripe = [&](int64_t k) {
      const auto [begin, end] = stripes.range(k);
      return flat.narrow(0, begin, end - begin);
    };
    if (on_source_node()) {
      intra.broadcast(flat, src);
    }
    if (inter.present() && stripe(stripes.mine).numel() > 0) {
      inter.broadcast(stripe(stripes.mine), leader);
    }
    if (!on_source_node()) {
      for (int64_t k = 0; k < stripes.count && intra.present(); ++k) {
        if (stripe(k).numel() > 0) {
          intra.broadcast(stripe(k), intra.ranks()[k]);
        }
      }
    }
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
  const auto wanted = algorithm_of(algorithm);
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
  const Route route(device.type(), src, inter_group, intra_group, wanted, leader);
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
