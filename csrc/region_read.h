// Reads regions of files straight into tensors: the region copy with a file in place of the bucket.
#pragma once

#include "region_copy.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace epload {

struct ReadOutcome {
  int64_t nbytes = 0; // that were read, gaps included
  int64_t file = -1;  // index of the file that could not be read; -1 for none
  int64_t offset = 0; // where, in bytes
  int64_t error = 0;  // errno; 0 when the file ended there
};

// Fills regions of `targets` (on CPU) from open files. Copy i reads from file `files[i]` of `descriptors`, with its
// bucket_offset counted from the start of the file. What is contiguous in the file and in the tensor goes there in one
// request with its neighbours, what is not through a small buffer of each thread; so do short requests on x86, as it is
// faster than the kernel's own copy.
ReadOutcome region_read(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    at::TensorList targets,
    const std::vector<RegionCopy>& copies,
    int64_t threads);

} // namespace epload
