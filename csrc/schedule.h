// Who sends which bytes to whom: stripes, chains, rings, leaders. Integers only; used by the broadcast op and, through
// the Python module _C, by the loader and its simulator. Ranks are global, offsets and sizes in bytes. Invalid
// arguments raise std::invalid_argument.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace epload {

using Ranks = std::vector<int64_t>;
using Nodes = std::vector<Ranks>; // the ranks of each node

// How a bucket gets to the ranks of all nodes; see planning/schedule.py. schedule.cpp lists them, with their steps.
enum class Algorithm : int;

Algorithm algorithm_of(const std::string& name);

// Whether each rank of a node sends its part of a bucket over its own rail.
bool is_striped(Algorithm algorithm);

constexpr int64_t kNoRank = -1;
constexpr int64_t kOpAlignment =
    16; // of the op's slots and stripes: the widest device access; a multiple of all itemsizes

struct Range {
  int64_t begin, end;
};

// Part `index` of `count` consecutive parts of a range. All parts have one size, a multiple of `alignment`; the last
// one has the rest too, which is less than `count * alignment` bytes.
Range stripe(Range whole, int64_t count, int64_t index, int64_t alignment);

struct Neighbors {
  int64_t before, after; // kNoRank for none
};

// In a chain through `ranks` that begins at rank `first`, goes on in their order and wraps around at the end. A rank
// that is not in the chain has no neighbors.
Neighbors chain_neighbors(const Ranks& ranks, int64_t first, int64_t rank);

// In a ring through `ranks`.
Neighbors ring_neighbors(const Ranks& ranks, int64_t rank);

// One rank per node, in the order of the nodes: those at the same place in their node as `src`.
Ranks leaders(const Nodes& nodes, int64_t src);

// The leader of one node where the others are not known: `src` if it is on it, else the lowest rank.
int64_t leader_of(const Ranks& node, int64_t src);

// Rail i has the i-th lowest rank of every node. The nodes are of equal size.
Nodes rails(const Nodes& nodes);

// One piece of a buffer as one rank relays it: receives it, and passes it on. kNoRank for none.
struct RelayStep {
  int64_t begin, end;
  int64_t from_inter, from_intra; // the sender in the inter-node or the intra-node group; neither: this rank has it
  int64_t to_inter, to_intra;     // the receivers
};

// A broadcast over the inter-node or the intra-node group; without a root, an all-gather in place, where each rank of
// the group gives one of as many equal parts.
struct BroadcastStep {
  int64_t begin, end;
  bool inter;
  int64_t root; // kNoRank for an all-gather
};

// Where a rank stands in a two-level broadcast of one bucket. `inter` and `intra` are the ranks of its groups in the
// groups' order, empty for none. `leader` is the root of its node, or, striped, of its rail (`inter`). Striped, the
// ranks of `intra` take the stripes in their order.
struct Position {
  Ranks inter, intra;
  int64_t self, src, leader;
  Algorithm algorithm;

  bool on_source_node() const;
};

// The broadcasts that the rank takes part in, in order: among the leaders, then in the node. Striped: first in the
// source's node, whose ranks then send their stripe over their rail; the other nodes then gather their stripes, and the
// last stripe's rest is broadcast. The source's node needs all bytes anyway, so a scatter and gather there would save
// nothing.
std::vector<BroadcastStep> broadcast_steps(const Position& position, int64_t nbytes, int64_t alignment);

// The same bytes relayed: each broadcast goes along a chain from its root, an all-gather along one from each rank. In
// two levels a leader passes on to its node what it has of a bucket while more arrives.
std::vector<RelayStep> relay_steps(const Position& position, int64_t nbytes, int64_t alignment);

// A bucket of a wave, and the number of the node on which it is read.
struct WaveBucket {
  int64_t node, begin, end;
};

struct WaveOptions {
  Algorithm algorithm;
  bool shared;  // the ranks of a node share their staging buffers
  bool crosses; // buckets move between nodes
};

// What a rank does with the buckets of a wave. Each node's leader (striped: each rank, with its stripe of every bucket)
// stands in a ring with those of the other nodes, and every bucket goes once around, from the node that reads it to the
// one before. A rank takes its own node's buckets first, then those of the node before, and so on, so that all links
// are busy and neighbors agree on the order. Without shared buffers the same order goes on from the leader along a
// chain of its node's ranks.
std::vector<RelayStep> wave_steps(
    const Nodes& nodes,
    int64_t src,
    int64_t rank,
    const WaveOptions& options,
    const std::vector<WaveBucket>& buckets,
    int64_t alignment);

} // namespace epload
