// The C interface between libepload, which knows torch and no CUDA, and libepload_cuda, which knows CUDA and no torch.
#pragma once

#include <cstdint>

// Changes whenever the table's layout or a signature does, so that a stale library is refused.
constexpr uint32_t kEploadCudaInterface = 1;

extern "C" {

uint32_t epload_cuda_interface();

// 0 if the current device can run these kernels, else a CUDA error.
int epload_cuda_ready();

// Queues one launch on `stream` (a cudaStream_t of the current device). `table` is device memory, alive until the
// launch has run: `regions` regions followed by `chunks` chunks (chunk.h), chunks > 0. `convert`: whether any region
// converts numbers. Returns 0 or a CUDA error.
int epload_cuda_region_copy(const void* table, uint32_t regions, uint32_t chunks, int convert, void* stream);

// The text of an error that a function above returned.
const char* epload_cuda_error(int error);

} // extern "C"
