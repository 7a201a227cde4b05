// The region copy's kernel and its launch. No torch; see api.h.
#include "api.h"
#include "chunk.h"

#include <cuda_runtime.h>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

namespace {

using epload::cuda::Chunk;
using epload::cuda::kLanes;
using epload::cuda::Region;

constexpr int kThreads = 256;
constexpr int kBlocks = 2; // a processor should hold: enough loads in flight to cover the memory's latency

template <bool kConvert>
__global__ void __launch_bounds__(kThreads, kBlocks)
    region_copy(const Region* __restrict__ regions, const Chunk* __restrict__ chunks, uint32_t count) {
  const uint32_t warps = gridDim.x * (kThreads / kLanes);
  const uint32_t lane = threadIdx.x % kLanes;
  for (uint32_t i = (blockIdx.x * kThreads + threadIdx.x) / kLanes; i < count; i += warps) {
    epload::cuda::run_chunk<kConvert>(regions, chunks[i], lane);
  }
}

template <bool kConvert>
cudaError_t launch(const Region* regions, const Chunk* chunks, uint32_t count, cudaStream_t stream) {
  int device = 0, processors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, region_copy<kConvert>, kThreads, 0);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t per_block = kThreads / kLanes;
  const uint32_t wanted = count / per_block + (count % per_block != 0);
  const auto most = static_cast<uint32_t>(processors * resident);
  void* arguments[] = {&regions, &chunks, &count};
  return cudaLaunchKernel(
      region_copy<kConvert>, dim3(wanted < most ? wanted : most), dim3(kThreads), arguments, 0, stream);
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

EPLOAD_EXPORT int epload_cuda_region_copy(
    const void* table, uint32_t regions, uint32_t chunks, int convert, void* stream) {
  const auto* first = static_cast<const Region*>(table);
  const auto* parts = reinterpret_cast<const Chunk*>(first + regions);
  const auto queue = static_cast<cudaStream_t>(stream);
  return convert ? launch<true>(first, parts, chunks, queue) : launch<false>(first, parts, chunks, queue);
}

EPLOAD_EXPORT const char* epload_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
