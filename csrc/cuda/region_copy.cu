// The region copy's kernel and its launch. No torch; see api.h.
#include "api.h"
#include "chunk.h"

#include <cuda_runtime.h>

#include <dlfcn.h>

#include <cstring>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

namespace {

using epload::cuda::Chunk;
using epload::cuda::kLanes;
using epload::cuda::Record;

constexpr int kThreads = 256;

// Blocks that a processor should hold, so that enough loads are in flight to cover the memory's latency.
template <bool kConvert>
constexpr int kBlocks = kConvert ? 2 : 3;

// A table that is an argument of the launch.
struct Inline {
  Record records[kEploadCudaInlineBytes / sizeof(Record)];
};
static_assert(sizeof(Inline) + 2 * sizeof(uint64_t) <= 4096, "what every driver takes");

template <bool kConvert>
__device__ void copy_chunks(const Record* records, uint32_t chunks) {
  const uint32_t warps = gridDim.x * (kThreads / kLanes);
  const uint32_t lane = threadIdx.x % kLanes;
  for (uint32_t i = (blockIdx.x * kThreads + threadIdx.x) / kLanes; i < chunks; i += warps) {
    epload::cuda::run_chunk<kConvert>(records[i].as<Chunk>(), records + chunks, lane);
  }
}

template <bool kConvert>
__global__ void __launch_bounds__(kThreads, kBlocks<kConvert>)
    region_copy(const Record* __restrict__ records, uint32_t chunks) {
  copy_chunks<kConvert>(records, chunks);
}

template <bool kConvert>
__global__ void __launch_bounds__(kThreads, kBlocks<kConvert>)
    region_copy_inline(const __grid_constant__ Inline table, uint32_t chunks) {
  copy_chunks<kConvert>(table.records, chunks);
}

// At most as many blocks as the device holds at once.
template <typename Kernel>
cudaError_t launch(Kernel* kernel, uint32_t chunks, void** arguments, cudaStream_t stream) {
  int device = 0, processors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t per_block = kThreads / kLanes;
  const uint32_t wanted = (chunks - 1) / per_block + 1;
  const auto most = static_cast<uint32_t>(processors * resident);
  return cudaLaunchKernel(kernel, dim3(wanted < most ? wanted : most), dim3(kThreads), arguments, 0, stream);
}

template <bool kConvert>
cudaError_t launch(const EploadCudaTable& table, cudaStream_t stream) {
  uint32_t chunks = table.chunks;
  if (table.nbytes > kEploadCudaInlineBytes) {
    const void* records = table.records;
    void* arguments[] = {&records, &chunks};
    return launch(region_copy<kConvert>, chunks, arguments, stream);
  }
  Inline inlined;
  std::memcpy(&inlined, table.records, table.nbytes);
  void* arguments[] = {&inlined, &chunks};
  return launch(region_copy_inline<kConvert>, chunks, arguments, stream);
}

} // namespace

EPLOAD_EXPORT uint32_t epload_cuda_interface() {
  return kEploadCudaInterface;
}

EPLOAD_EXPORT int epload_cuda_ready() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, region_copy<true>);
  cudaGetLastError(); // an old device is an answer, not an error for the next caller to find
  return error;
}

EPLOAD_EXPORT int epload_cuda_region_copy(const EploadCudaTable* table, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  return table->convert != 0 ? launch<true>(*table, queue) : launch<false>(*table, queue);
}

EPLOAD_EXPORT int epload_cuda_pin(void* memory, uint64_t nbytes) {
  const cudaError_t error = cudaHostRegister(memory, nbytes, cudaHostRegisterPortable);
  cudaGetLastError();
  return error;
}

EPLOAD_EXPORT void epload_cuda_unpin(void* memory) {
  cudaHostUnregister(memory);
  cudaGetLastError();
}

EPLOAD_EXPORT int epload_cuda_share(const void* memory, EploadCudaAllocation* found) {
  // Of the driver, which is there once the runtime is: what a pointer is part of is not known to the runtime.
  using Range = int (*)(unsigned long long* base, size_t* nbytes, unsigned long long pointer);
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto range =
      driver != nullptr ? reinterpret_cast<Range>(dlsym(driver, "cuMemGetAddressRange_v2")) : nullptr;
  unsigned long long base = 0;
  size_t nbytes = 0;
  if (range == nullptr) {
    return cudaErrorNotSupported;
  }
  cudaFree(nullptr); // a thread that has not called the runtime yet has no context, which the driver asks for
  // The runtime's errors have the driver's numbers.
  if (const int error = range(&base, &nbytes, reinterpret_cast<unsigned long long>(memory)); error != 0) {
    return error;
  }
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == sizeof found->handle, "what the interface has room for");
  const cudaError_t error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base));
  cudaGetLastError();
  std::memcpy(found->handle, &handle, sizeof handle);
  found->base = base;
  found->nbytes = nbytes;
  return error;
}

EPLOAD_EXPORT int epload_cuda_open(const char* handle, void** memory) {
  cudaIpcMemHandle_t opened;
  std::memcpy(&opened, handle, sizeof opened);
  const cudaError_t error = cudaIpcOpenMemHandle(memory, opened, cudaIpcMemLazyEnablePeerAccess);
  cudaGetLastError();
  return error;
}

EPLOAD_EXPORT void epload_cuda_close(void* memory) {
  cudaIpcCloseMemHandle(memory);
  cudaGetLastError();
}

EPLOAD_EXPORT const char* epload_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
