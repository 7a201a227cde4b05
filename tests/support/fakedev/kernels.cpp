// The interface of libepload_cuda, with the kernel's own code run lane by lane on a stream of the fake accelerator.
#include "../../../csrc/cuda/api.h"

#include "../../../csrc/cuda/chunk.h"
#include "runtime.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <vector>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

EPLOAD_EXPORT uint32_t epload_cuda_interface() {
  return kEploadCudaInterface;
}

EPLOAD_EXPORT int epload_cuda_ready() {
  return std::getenv("EPLOAD_TEST_NO_KERNELS") != nullptr ? 209 : 0;
}

EPLOAD_EXPORT int epload_cuda_region_copy(const EploadCudaTable* table, void* stream) {
  using namespace epload::cuda;
  const auto* records = static_cast<const Record*>(table->records);
  // Memory of the device is read when the launch runs, arguments are taken now.
  const uint64_t taken = table->nbytes <= kEploadCudaInlineBytes ? table->nbytes / sizeof(Record) : 0;
  const std::vector<Record> arguments(records, records + taken);
  static_cast<fakedev::Queue*>(stream)->push("region copy", [=, all = *table] {
    misaligned = false;
    const Record* const parts = taken != 0 ? arguments.data() : records;
    for (uint32_t i = 0; i < all.chunks; ++i) {
      const auto chunk = parts[i].as<Chunk>();
      TORCH_CHECK(
          chunk.dims == 0 || all.chunks + chunk.dim + chunk.dims <= all.nbytes / sizeof(Record),
          "chunk ",
          i,
          " has dims past the table's end");
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        all.convert != 0 ? run_chunk<true>(chunk, parts + all.chunks, lane)
                         : run_chunk<false>(chunk, parts + all.chunks, lane);
      }
    }
    TORCH_CHECK(!misaligned, "the region copy accessed memory that is not aligned to the width of the access");
  });
  return 0;
}

EPLOAD_EXPORT int epload_cuda_pin(void* memory, uint64_t nbytes) {
  fakedev::pin(memory, nbytes);
  return 0;
}

EPLOAD_EXPORT void epload_cuda_unpin(void* memory) {
  fakedev::unpin(memory);
}

EPLOAD_EXPORT int epload_cuda_share(const void* memory, EploadCudaAllocation* found) {
  return std::getenv("EPLOAD_TEST_NOT_SHARED") == nullptr &&
                 fakedev::share(memory, found->handle, found->base, found->nbytes)
             ? 0
             : 1;
}

EPLOAD_EXPORT int epload_cuda_open(const char* handle, void** memory) {
  *memory = fakedev::open(handle);
  return *memory != nullptr ? 0 : 400;
}

EPLOAD_EXPORT void epload_cuda_close(void* memory) {
  fakedev::close(memory);
}

EPLOAD_EXPORT const char* epload_cuda_error(int error) {
  switch (error) {
    case 1:
      return "invalid argument";
    case 209:
      return "no kernel image is available for execution on the device";
    default:
      return "invalid resource handle";
  }
}
