// The interface of libepload_cuda, with the kernel's own code run lane by lane on a stream of the fake accelerator.
#include "../../../csrc/cuda/api.h"

#include "../../../csrc/cuda/chunk.h"
#include "runtime.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

EPLOAD_EXPORT uint32_t epload_cuda_interface() {
  return kEploadCudaInterface;
}

EPLOAD_EXPORT int epload_cuda_ready() {
  return std::getenv("EPLOAD_TEST_NO_KERNELS") != nullptr ? 209 : 0;
}

EPLOAD_EXPORT int epload_cuda_region_copy(
    const void* table, uint32_t regions, uint32_t chunks, int convert, void* stream) {
  using namespace epload::cuda;
  static_cast<fakedev::Queue*>(stream)->push("region copy", [=] {
    const auto* const first = static_cast<const Region*>(table);
    const auto* const parts = reinterpret_cast<const Chunk*>(first + regions);
    misaligned = false;
    for (uint32_t i = 0; i < chunks; ++i) {
      TORCH_CHECK(parts[i].region < regions, "chunk ", i, " names region ", parts[i].region, " of ", regions);
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        convert ? run_chunk<true>(first, parts[i], lane) : run_chunk<false>(first, parts[i], lane);
      }
    }
    TORCH_CHECK(!misaligned, "the region copy accessed memory that is not aligned to the width of the access");
  });
  return 0;
}

EPLOAD_EXPORT const char* epload_cuda_error(int error) {
  return error == 209 ? "no kernel image is available for execution on the device" : "no other error is possible here";
}
