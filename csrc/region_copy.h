// The batched strided copy between a byte bucket and many tensors. Pack and unpack are both it.
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
  Dims start;            // elements, one entry a dim of the tensor
  Dims size;
  Dims bucket_stride; // elements of `dtype`
};

enum class Direction { kPack, kUnpack }; // tensors -> bucket, bucket -> tensors

// Decodes a copy table, an int64 CPU tensor of one row a region: [tensor, bucket_offset, dtype, ndim, start[D],
// size[D], stride[D]], with D = (columns - 4) / 3 and the entries past ndim ignored. Every row is checked against the
// bucket and its tensor: a table that reaches outside them throws ValueError naming the row, before anything is copied.
std::vector<RegionCopy> decode_copies(const at::Tensor& bucket, at::TensorList tensors, const at::Tensor& table);

// The same for a table whose offsets count from the start of something else of `nbytes`, e.g. a file. `offsets`, one a
// row, are in place of the table's if there are any.
std::vector<RegionCopy> decode_copies(
    int64_t nbytes, at::TensorList tensors, const at::Tensor& table, c10::IntArrayRef offsets = {});

// The same without tensors to check against.
std::vector<RegionCopy> decode_copies(int64_t nbytes, const at::Tensor& table, c10::IntArrayRef offsets = {});

// Runs the copies on the current stream of the bucket's device. Where dtypes differ, the value is converted as
// Tensor.copy_ does. Regions of one call must not overlap in the destination. `bucket` is contiguous uint8.
void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

// For walks through thousands of tensors, which lie all over memory: at tensor i, has what is known of those that come
// next fetched, so that it is there by the time it is asked for.
void fetch_ahead(at::TensorList tensors, size_t i);

// The same step by step: for one tensor, and, some time after that, for its storage.
void fetch_tensor(const at::Tensor& tensor);
void fetch_storage(const at::Tensor& tensor);

// Throws ValueError, naming `op` and the tensor's number, unless the tensor is dense, strided, not a lazy conjugate or
// negation, and its storage holds every element (FSDP frees storage behind a tensor's back).
void check_memory(const char* op, const at::Tensor& tensor, size_t index);

// The numbers of a table that an op takes: throws ValueError, naming `op` and the table, unless it is a contiguous
// int64 CPU tensor of so many dims that has memory.
const int64_t* numbers_of(const char* op, const char* name, const at::Tensor& table, int64_t dims);

using RegionCopyFn = void (*)(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

// Each device's implementation registers itself; a device without one gets `region_copy_aten`.
struct RegisterRegionCopy {
  RegisterRegionCopy(c10::DeviceType device, RegionCopyFn fn);
};

// One Tensor.copy_ a region: right everywhere, and how one region with a dtype cast is done on CPU.
void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction);

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction);

} // namespace epload
