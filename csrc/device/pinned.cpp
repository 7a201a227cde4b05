#include "pinned.h"

#include "../cpu/threads.h"
#include "../driver.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

namespace epload {
namespace {

constexpr int64_t kPage = 64 << 10; // the largest of any machine
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kTouchThreads = 4;

int64_t up_to(int64_t multiple, int64_t number) {
  return (number + multiple - 1) / multiple * multiple;
}

// Null if there is no memory.
char* huge_pages(int64_t nbytes) {
  void* const mapped = mmap(nullptr, nbytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<char*>(mapped);
  auto* const memory = reinterpret_cast<char*>(up_to(kHugePage, reinterpret_cast<int64_t>(begin)));
  if (memory > begin) {
    munmap(begin, memory - begin);
  }
  if (const int64_t left = begin + kHugePage - memory; left > 0) {
    munmap(memory + nbytes, left);
  }
  madvise(memory, nbytes, MADV_HUGEPAGE); // a hint, which not every kernel takes
  madvise(memory, nbytes, MADV_DONTFORK); // else a write after a fork could go to another page than the device's
  Tasks tasks((nbytes + kHugePage - 1) / kHugePage);
  on_threads(kTouchThreads, tasks, [&] {
    for (size_t task = 0; (task = tasks.take()) < tasks.count();) {
      const int64_t at = static_cast<int64_t>(task) * kHugePage;
      std::memset(memory + at, 0, std::min(kHugePage, nbytes - at));
    }
  });
  return memory;
}

} // namespace

at::Tensor pinned_memory(int64_t nbytes, c10::Device device) {
  const c10::DeviceGuard on_device(device);
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const auto& driver = driver_of(device.type());
  const int64_t whole = up_to(kPage, nbytes);
  if (char* const memory = driver.pin != nullptr ? huge_pages(whole) : nullptr; memory != nullptr) {
    if (driver.pin(memory, whole)) {
      const auto free = [whole, device, unpin = driver.unpin, owner = getpid()](void* data) {
        if (getpid() != owner) {
          return; // a child of a fork has never had it
        }
        try {
          const c10::DeviceGuard unpinned_there(device); // else a driver may begin with another device
          unpin(data);
        } catch (const std::exception&) {
          return; // the device is of no more use, and may still use the memory
        }
        munmap(data, whole);
      };
      return at::from_blob(memory, {nbytes}, free, bytes);
    }
    munmap(memory, whole);
  }
  const auto memory = at::empty({nbytes + kPage}, bytes.pinned_memory(true));
  const auto past = reinterpret_cast<int64_t>(memory.data_ptr()) % kPage;
  return memory.narrow(0, (kPage - past) % kPage, nbytes);
}

} // namespace epload
