// Digests of regions of files, which shards are compared with.
#pragma once

#include "ranged_reader.h"

#include "../copy_table.h"

#include <ATen/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace epload {

struct FileDigests {
  std::vector<uint64_t> digests; // of the regions, in their order
  ReadOutcome outcome;           // the digests are valid only if all files could be read
};

// The digest that each region will have once it is unpacked into a tensor of `dtypes[i]`. Copy i lies in file
// `files[i]`, with its bucket_offset counted from the start of the file; `tensor` and `start` are ignored.
//
// Regions that lie near one another are read together, each byte once, in pieces of `piece_bytes` that stay in a
// processor's cache until they have been digested. A longer group of overlapping regions is in memory as a whole only
// if the elements of one are not in row-major order in the file, or are converted (unless it is alone and contiguous).
FileDigests digest_files(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    const std::vector<RegionCopy>& copies,
    const std::vector<at::ScalarType>& dtypes,
    int64_t threads,
    bool direct = false,              // see RangedReader
    int64_t piece_bytes = 256 << 10); // half of what a small core caches

} // namespace epload
