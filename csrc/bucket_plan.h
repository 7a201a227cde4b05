// Bucket planning: integers in, slots and buckets out.
#pragma once

#include <cstdint>
#include <vector>

namespace epload {

// How one tensor may be cut when it is larger than a bucket, in bytes of its row-major form. A cut falls on a multiple
// of `granule` and never crosses a multiple of `slab`, so that every piece is a box of the tensor's index space:
// `granule` is the size of one index along the cut dim, `slab` that of the whole cut dim.
struct TensorExtent {
  int64_t nbytes;
  int64_t granule;
  int64_t slab;
};

// One piece of one tensor inside one bucket. Offsets and sizes in bytes.
struct Slot {
  int64_t tensor;
  int64_t tensor_offset;
  int64_t bucket;
  int64_t bucket_offset;
  int64_t nbytes;
};

struct BucketPlan {
  std::vector<Slot> slots;            // in tensor order, then by tensor_offset
  std::vector<int64_t> bucket_nbytes; // used bytes of each bucket, `header` included
};

// Chooses granule and slab for a row-major tensor: the outermost dim whose single index fits in `room` bytes.
TensorExtent extent_of(const int64_t* shape, int64_t ndim, int64_t itemsize, int64_t room);

// Fills buckets of `capacity` bytes in tensor order. Each bucket starts with `header` reserved bytes; each slot starts
// on a multiple of `alignment`. A tensor that fits in a bucket is never cut; empty tensors get no slot. Throws
// std::invalid_argument when the numbers make no sense or a granule does not fit.
BucketPlan plan_buckets(const std::vector<TensorExtent>& tensors, int64_t capacity, int64_t alignment, int64_t header);

} // namespace epload
