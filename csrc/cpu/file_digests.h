// Digests of regions as they lie in files: what shards are compared with.
#pragma once

#include "reads.h"

#include "../region_copy.h"

#include <ATen/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace epload {

struct FileDigests {
  std::vector<uint64_t> digests; // of the regions, in their order
  ReadOutcome outcome;           // if a file could not be read, the digests mean nothing
};

// The digest that each region will have once it is unpacked into a tensor of `dtypes[i]`. Copy i lies in file
// `files[i]` of the open ones, with its bucket_offset counted from the start of the file; `tensor` and `start` do not
// matter.
//
// Regions that lie near one another are read together, each byte once, in pieces of `piece_bytes` that stay in a
// processor's cache until they have been digested. Regions that overlap and are longer are in memory all at once only
// if the elements of one do not lie in their order in the file, or are converted; so is one by itself that is converted
// and not contiguous.
FileDigests digest_files(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    const std::vector<RegionCopy>& copies,
    const std::vector<at::ScalarType>& dtypes,
    int64_t threads,
    int64_t piece_bytes = 256 << 10); // half of what a small core caches

} // namespace epload
