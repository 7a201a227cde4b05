// The C interface between libepload, which knows torch and no CUDA, and libepload_cuda, which knows CUDA and no torch.
#pragma once

#include <cstdint>

// Changes whenever the table's layout or a signature does, so that a stale library is refused.
constexpr uint32_t kEploadCudaInterface = 4;

// A table of at most so many bytes travels with the launch, so that nothing is allocated for it or copied. A launch
// takes 4 KiB of arguments; more needs a driver of CUDA 12.1 and later.
constexpr uint32_t kEploadCudaInlineBytes = 3968;

extern "C" {

// `nbytes` of records (chunk.h): `chunks` chunks, then the dims of those that are strided.
struct EploadCudaTable {
  const void* records; // on the host if there are at most kEploadCudaInlineBytes, else device memory, alive until the
                       // launch has run
  uint64_t nbytes;
  uint32_t chunks;
  int32_t convert; // whether any chunk converts numbers
};

uint32_t epload_cuda_interface();

// 0 if the current device can run these kernels, else a CUDA error.
int epload_cuda_ready();

// Queues one launch on `stream` (a cudaStream_t of the current device). The table has a chunk at least. Returns 0 or a
// CUDA error.
int epload_cuda_region_copy(const EploadCudaTable* table, void* stream);

// Pins memory that is there already, for the current device and all others; 0 or a CUDA error, of which the runtime
// keeps no trace. What was pinned is unpinned before it is freed.
int epload_cuda_pin(void* memory, uint64_t nbytes);
void epload_cuda_unpin(void* memory);

// An allocation that other processes open by its handle.
struct EploadCudaAllocation {
  char handle[64];
  uint64_t base;
  uint64_t nbytes;
};

// The allocation of the current device that `memory` is in; 0 or a CUDA error, of which the runtime keeps no trace.
// Memory that cudaMalloc has not given out, such as of expandable segments or cudaMallocAsync, is an error.
int epload_cuda_share(const void* memory, EploadCudaAllocation* found);

// Maps an allocation of another process for the current device, which may be another card's if the two reach each
// other; the same returns. Each that was opened is closed, with the same device current.
int epload_cuda_open(const char* handle, void** memory);
void epload_cuda_close(void* memory);

// The text of an error that a function above returned.
const char* epload_cuda_error(int error);

} // extern "C"
