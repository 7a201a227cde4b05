// The relay: pieces of a bucket received from one rank and passed on to others, chunk by chunk, while more arrive.
#pragma once

#include "collective.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace epload {

// One piece of a bucket as one rank handles it. Ranks are global; -1 for none.
struct RelayStep {
  int64_t begin, end;             // bytes of the bucket
  int64_t from_inter, from_intra; // where it comes from; both -1: it is here already
  int64_t to_inter, to_intra;     // where it goes on to
};

// Runs the steps in order on `bucket` (contiguous bytes on CPU). Every piece is cut into chunks of `chunk_bytes`, so
// that a rank passes on what it has while the rest is under way: along a chain of N ranks the last byte arrives after
// bytes / rate + (N - 2) * chunk / rate. Two ranks that are joined by steps over one group must have these in one
// order. The groups are two, as messages of each are received without regard to the other's. Returns the number of
// messages sent and received. The bucket holds the result when this returns, and all sends from it are complete.
//
// With a `board`, the relay is given up as soon as a failure is posted on it, also while it waits for a message. With
// `seconds` above 0, a message may take no longer; else no longer than its group's timeout. When this throws, no
// message writes to the bucket any more, and the groups are of no further use.
int64_t relay(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes,
    const std::optional<at::Tensor>& board = std::nullopt,
    double seconds = 0);

} // namespace epload
