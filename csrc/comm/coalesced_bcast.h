// The coalesced two-level broadcast: checks, bucket plan, and per bucket pack -> leaders -> node -> unpack on one
// stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>

namespace epload {

// Collective over the ranks of both groups; every rank passes the same number of tensors, of the same dtypes and sizes,
// in the same order. `src` is a global rank. `inter_group` has one leader per node, `src` among them, and is empty on a
// rank that leads no node; `intra_group` has this node's ranks and is empty if there is only one. `leader` is the
// global rank of this node's leader; -1 derives it: `src` on its own node, elsewhere the node's lowest rank. With
// algorithm "flat", `inter_group` is the one group of all ranks. With "striped", it is this rank's rail, on which is
// the rank of every node that comes at the same place in its `intra_group`, and `leader` the one of the source's node.
// Throws ValueError before anything has moved.
void coalesced_bcast(
    at::TensorList tensors,
    int64_t src,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t bucket_bytes,
    const std::string& algorithm,
    std::optional<c10::Stream> stream,
    int64_t leader);

} // namespace epload
