// A region with adjacent dims merged: the form that the native copies use.
#pragma once

#include "region_copy.h"

namespace epload {

// `run` elements that are contiguous in the tensor and in the bucket, repeated over the outer dims. Element sizes may
// differ between the two sides (a region that converts).
struct Strided {
  int64_t tensor = 0; // offset of the first element in the tensor's data, in bytes
  int64_t bucket = 0;
  int64_t run = 0;                         // elements; 0 for a region that holds none
  Dims size, tensor_stride, bucket_stride; // outermost first; strides in bytes
};

// Bytes from a region's first element in the bucket to its last; 0 for one without elements.
int64_t span_of(const RegionCopy& copy);

// The dims of a region as they are nested in the bucket, which for a transposed tensor is another order than its own.
Dims innermost_first(const RegionCopy& copy);

// The halves of a region, cut where they lie farthest apart in the bucket; false if it has one element.
bool halve(const RegionCopy& copy, RegionCopy& first, RegionCopy& second);

// Uses the tensor's layout, not its data.
Strided collapse(const at::Tensor& tensor, const RegionCopy& copy);

} // namespace epload
