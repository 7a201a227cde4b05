// A region reduced to its fewest dims: what the native copies work on.
#pragma once

#include "region_copy.h"

namespace epload {

// `run` elements that are contiguous in the tensor and in the bucket, repeated over the outer dims. Element sizes may
// differ between the two sides (a region that converts).
struct Strided {
  char* tensor = nullptr; // first element
  char* bucket = nullptr;
  int64_t run = 0;                         // elements; 0 for a region that holds none
  Dims size, tensor_stride, bucket_stride; // outermost first; strides in bytes
};

// `bucket` is the bucket's first byte.
Strided collapse(char* bucket, const at::Tensor& tensor, const RegionCopy& copy);

} // namespace epload
