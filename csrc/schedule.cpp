#include "schedule.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace epload {

enum class Algorithm : int { kTwoLevel, kStriped };

constexpr std::array<std::pair<const char*, Algorithm>, 2> kAlgorithms{
    {{"two_level", Algorithm::kTwoLevel}, {"striped", Algorithm::kStriped}}};

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(std::string("schedule: ") + what);
  }
}

bool has(const Ranks& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// The rank's index; the number of ranks if it is not among them.
int64_t index_of(const Ranks& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
}

// How many ranks are lower.
int64_t place_of(const Ranks& ranks, int64_t rank) {
  return std::count_if(ranks.begin(), ranks.end(), [rank](int64_t other) { return other < rank; });
}

int64_t node_of(const Nodes& nodes, int64_t rank) {
  const auto found = std::find_if(nodes.begin(), nodes.end(), [rank](const Ranks& node) { return has(node, rank); });
  require(found != nodes.end(), "expected a rank of one of the nodes");
  return found - nodes.begin();
}

// The size of all stripes but the last one.
int64_t stripe_bytes(int64_t nbytes, int64_t count, int64_t alignment) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
  require(nbytes >= 0 && nbytes <= kMost, "expected a size from 0 to 2**61 bytes");
  require(count > 0 && alignment > 0 && alignment <= kMost, "expected a positive number of stripes and alignment");
  return nbytes / count / alignment * alignment;
}

// For each node, the rank on it that is in the same ring as `rank`, which is on one of the nodes.
Ranks ring_through(const Nodes& nodes, int64_t src, int64_t rank, Algorithm algorithm) {
  if (!is_striped(algorithm)) {
    return leaders(nodes, src);
  }
  const auto all = rails(nodes);
  return *std::find_if(all.begin(), all.end(), [rank](const Ranks& rail) { return has(rail, rank); });
}

} // namespace

Algorithm algorithm_of(const std::string& name) {
  std::string names;
  for (const auto& [candidate, algorithm] : kAlgorithms) {
    if (name == candidate) {
      return algorithm;
    }
    names += std::string(names.empty() ? "'" : " or '") + candidate + "'";
  }
  throw std::invalid_argument("schedule: expected algorithm " + names + ", got '" + name + "'");
}

bool is_striped(Algorithm algorithm) {
  return algorithm == Algorithm::kStriped;
}

Range stripe(Range whole, int64_t count, int64_t index, int64_t alignment) {
  require(whole.begin >= 0 && whole.begin <= whole.end, "expected a range of bytes");
  const int64_t nbytes = whole.end - whole.begin;
  const int64_t each = stripe_bytes(nbytes, count, alignment);
  require(index >= 0 && index < count, "expected the index of a stripe");
  const int64_t begin = whole.begin + index * each;
  return {begin, index + 1 < count ? begin + each : whole.end};
}

Neighbors chain_neighbors(const Ranks& ranks, int64_t first, int64_t rank) {
  const auto count = static_cast<int64_t>(ranks.size());
  const int64_t start = index_of(ranks, first), at = index_of(ranks, rank);
  if (at == count) {
    return {kNoRank, kNoRank};
  }
  require(start < count, "expected a chain that begins at one of its ranks");
  const auto [before, after] = ring_neighbors(ranks, rank);
  return {at == start ? kNoRank : before, (at + 1) % count == start ? kNoRank : after};
}

Neighbors ring_neighbors(const Ranks& ranks, int64_t rank) {
  const auto count = static_cast<int64_t>(ranks.size());
  const int64_t at = index_of(ranks, rank);
  if (at == count) {
    return {kNoRank, kNoRank};
  }
  return {ranks[(at + count - 1) % count], ranks[(at + 1) % count]};
}

Ranks leaders(const Nodes& nodes, int64_t src) {
  const auto place = index_of(nodes[node_of(nodes, src)], src);
  Ranks found;
  for (const auto& node : nodes) {
    require(!node.empty(), "expected nodes with ranks");
    found.push_back(node[place % static_cast<int64_t>(node.size())]);
  }
  return found;
}

int64_t leader_of(const Ranks& node, int64_t src) {
  require(!node.empty(), "expected a node with ranks");
  return has(node, src) ? src : *std::min_element(node.begin(), node.end());
}

Nodes rails(const Nodes& nodes) {
  Nodes found(nodes.empty() ? 0 : nodes[0].size());
  for (auto node : nodes) {
    require(node.size() == found.size(), "expected nodes of equal size");
    std::sort(node.begin(), node.end());
    for (size_t i = 0; i < node.size(); ++i) {
      found[i].push_back(node[i]);
    }
  }
  return found;
}

bool Position::on_source_node() const {
  return self == src || has(intra, src);
}

std::vector<BroadcastStep> broadcast_steps(const Position& at, int64_t nbytes, int64_t alignment) {
  std::vector<BroadcastStep> steps;
  const auto add = [&steps](Range range, bool inter, const Ranks& group, int64_t root) {
    if (!group.empty() && range.begin < range.end) {
      steps.push_back({range.begin, range.end, inter, root});
    }
  };
  const Range whole{0, nbytes};
  if (at.algorithm == Algorithm::kTwoLevel) {
    add(whole, true, at.inter, at.src); // first, as a leader would otherwise spread what it has not received yet
    add(whole, false, at.intra, at.leader);
    return steps;
  }
  const int64_t count = std::max<int64_t>(static_cast<int64_t>(at.intra.size()), 1);
  if (at.on_source_node()) {
    add(whole, false, at.intra, at.src);
  }
  add(stripe(whole, count, index_of(at.intra, at.self), alignment), true, at.inter, at.leader);
  if (!at.on_source_node() && !at.intra.empty()) {
    const int64_t equal = stripe_bytes(nbytes, count, alignment) * count; // bytes
    add({0, equal}, false, at.intra, kNoRank);
    add({equal, nbytes}, false, at.intra, at.intra.back());
  }
  return steps;
}

std::vector<RelayStep> relay_steps(const Position& at, int64_t nbytes, int64_t alignment) {
  if (!is_striped(at.algorithm)) {
    const auto inter = chain_neighbors(at.inter, at.src, at.self);
    const auto intra = chain_neighbors(at.intra, at.leader, at.self);
    return {{0, nbytes, inter.before, intra.before, inter.after, intra.after}};
  }
  std::vector<RelayStep> steps;
  for (const auto& step : broadcast_steps(at, nbytes, alignment)) {
    const auto& group = step.inter ? at.inter : at.intra;
    const Ranks roots = step.root == kNoRank ? group : Ranks{step.root};
    const auto count = static_cast<int64_t>(roots.size());
    for (int64_t i = 0; i < count; ++i) {
      const auto [begin, end] = stripe({step.begin, step.end}, count, i, 1);
      const auto [before, after] = chain_neighbors(group, roots[i], at.self);
      steps.push_back(
          step.inter ? RelayStep{begin, end, before, kNoRank, after, kNoRank}
                     : RelayStep{begin, end, kNoRank, before, kNoRank, after});
    }
  }
  return steps;
}

std::vector<RelayStep> wave_steps(
    const Nodes& nodes,
    int64_t src,
    int64_t rank,
    const WaveOptions& options,
    const std::vector<WaveBucket>& buckets,
    int64_t alignment) {
  const int64_t own = node_of(nodes, rank);
  const auto ring = ring_through(nodes, src, rank, options.algorithm);
  const auto& node = nodes[own];
  const auto links = ring_neighbors(ring, ring[own]);
  const auto chain = options.shared ? Neighbors{kNoRank, kNoRank} : chain_neighbors(node, ring[own], rank);
  const int64_t count = options.crosses ? static_cast<int64_t>(nodes.size()) : 1;
  std::vector<RelayStep> steps;
  for (int64_t distance = 0; distance < count; ++distance) {
    const int64_t origin = options.crosses ? (own - distance + count) % count : own;
    const bool goes_on = options.crosses && (own + 1) % count != origin;
    for (const auto& bucket : buckets) {
      if (bucket.node != origin) {
        continue;
      }
      const Range whole{bucket.begin, bucket.end};
      const auto [begin, end] = is_striped(options.algorithm)
                                    ? stripe(whole, static_cast<int64_t>(node.size()), place_of(node, rank), alignment)
                                    : whole;
      if (rank == ring[own]) {
        const int64_t from = distance > 0 ? links.before : kNoRank;
        steps.push_back({begin, end, from, kNoRank, goes_on ? links.after : kNoRank, chain.after});
      } else {
        steps.push_back({begin, end, kNoRank, chain.before, kNoRank, chain.after});
      }
    }
  }
  return steps;
}

} // namespace epload
