// The relay: pieces of a bucket are received from one rank and passed on to others, chunk by chunk, while more arrive.
#pragma once

#include "../schedule.h"
#include "collective.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace epload {

// Runs the steps in order on `bucket` (contiguous bytes on CPU). Every piece is cut into chunks of `chunk_bytes`, so
// that a rank passes on what it has while the rest is under way: along a chain of N ranks the last byte arrives after
// bytes / rate + (N - 2) * chunk / rate. Two ranks that exchange messages over a group must have these steps in the
// same order. There are two groups, as messages of one are received independently of the other's. Returns the number of
// messages sent and received. When this returns, the bucket has the result and all sends from it are complete.
//
// With a `board`, the relay is given up as soon as a failure is posted on it, also while it waits for a message. With
// `seconds` above 0, a message may take no longer; else no longer than its group's timeout. When this throws, no
// message writes to the bucket any more, and the groups must not be used again.
int64_t relay(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes,
    const std::optional<at::Tensor>& board = std::nullopt,
    double seconds = 0);

} // namespace epload
