// What every op needs to know of the memory of the tensors that it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace epload {

// Throws ValueError, naming `op` and the tensor's index, unless the tensor is dense, strided, not a lazy conjugate or
// negation, and its storage holds every element (FSDP frees the storage of its parameters).
void check_memory(const char* op, const at::Tensor& tensor, size_t index);

// Throws ValueError, naming `op` and the tensor, unless all are on `device`.
void check_device(const char* op, at::TensorList tensors, c10::Device device);

// Throws ValueError, naming `op` and the tensor, unless it is a contiguous CPU tensor of this dtype and `dims` dims
// that has memory.
void check_array(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t dims);

// The numbers in a table that an op takes: an array of int64.
const int64_t* numbers_of(const char* op, const char* name, const at::Tensor& table, int64_t dims);

// Tells autograd that tensors are written in place, as every in-place op does: before the first write, as a call that
// fails later has changed them, too, and after the last check of its arguments.
void mark_written(at::TensorList tensors);

} // namespace epload
