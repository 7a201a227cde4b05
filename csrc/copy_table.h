// Copy tables: which regions of which tensors are copied, and where they lie in a bucket or a file. Every op checks its
// table here before it copies anything.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace epload {

using Dims = c10::SmallVector<int64_t, 4>;

// One region: the box [start, start + size) of `tensors[tensor]`, and where its elements lie in the bucket.
struct RegionCopy {
  int64_t tensor;
  int64_t bucket_offset; // bytes
  at::ScalarType dtype;  // of the elements in the bucket
  Dims start;            // elements, one entry per dim of the tensor
  Dims size;
  Dims bucket_stride; // elements of `dtype`
};

// Decodes a copy table, an int64 CPU tensor with one region per row: [tensor, bucket_offset, dtype, ndim, start[D],
// size[D], stride[D]], with D = (columns - 4) / 3 and the entries past ndim ignored. Every row is checked against the
// bucket and its tensor: a row that reaches outside them throws ValueError naming it.
std::vector<RegionCopy> decode_copies(const at::Tensor& bucket, at::TensorList tensors, const at::Tensor& table);

// Throws ValueError unless it is a contiguous 1-D uint8 tensor whose memory can be used.
void check_bucket(const at::Tensor& bucket);

// The same for a table whose offsets count from the start of something else of `nbytes`, such as a file. `offsets`, one
// per row, replace those of the table unless they are empty.
std::vector<RegionCopy> decode_copies(
    int64_t nbytes, at::TensorList tensors, const at::Tensor& table, c10::IntArrayRef offsets = {});

// The same without tensors to check against.
std::vector<RegionCopy> decode_copies(int64_t nbytes, const at::Tensor& table, c10::IntArrayRef offsets = {});

} // namespace epload
