// A fake of the part of CANN that torch_npu 2.13 calls for memory, streams, events and HCCL's broadcast, for tests. A
// stream is a thread with a queue; a communicator is a piece of shared memory with a barrier. There are no kernels.
// With FAKECANN_TRACE, a line for each thing queued is appended to that file: what, bytes, stream.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#define CANN extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kFine = 0, kNoContext = 107002, kOutOfMemory = 207001;
constexpr size_t kPage = 4096, kWindow = 1 << 20;

void trace(const char* what, size_t nbytes, const void* stream) {
  static FILE* const file = [] {
    const char* const path = std::getenv("FAKECANN_TRACE");
    return path != nullptr ? std::fopen(path, "a") : nullptr;
  }();
  if (file != nullptr) {
    std::fprintf(file, "%s %zu %p\n", what, nbytes, stream);
    std::fflush(file);
  }
}

class Stream {
 public:
  Stream() {
    std::thread([this] { work(); }).detach();
  }

  void push(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    arrived_.notify_one();
  }

  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }

  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      arrived_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      lock.lock();
      busy_ = false;
      if (tasks_.empty()) {
        done_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_, done_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
};

// Waiting for an event means what was recorded last, at the time of the call.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  Clock::time_point at;

  uint64_t last() {
    const std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }
  void wait(uint64_t generation) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached >= generation; });
  }
};

std::mutex streams_mutex;
std::set<Stream*> streams;

Stream* make_stream() {
  auto* const made = new Stream;
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(made);
  return made;
}

Stream* stream_of(void* handle) {
  static Stream* const standard = make_stream();
  return handle != nullptr ? static_cast<Stream*>(handle) : standard;
}

thread_local int current_device = 0;
std::atomic<int> device_error{0}, broadcast_error{0};
thread_local bool has_context = false;

int allocate(void** data, size_t nbytes) {
  *data = std::aligned_alloc(kPage, (nbytes + 2 * kPage) / kPage * kPage);
  return *data != nullptr ? kFine : kOutOfMemory;
}

struct Shared {
  pthread_barrier_t barrier;
  std::atomic<int> ready;
  char window[kWindow];
};

struct Communicator {
  uint32_t rank;
  Shared* shared;
  char name[128];
};

size_t item_size(int type) { // HcclDataType
  constexpr size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};
  return sizes[type];
}

} // namespace

// ---- device, memory ----

CANN int aclInit(const char*) {
  return kFine;
}
CANN int aclrtGetDeviceCount(uint32_t* count) {
  *count = 2;
  return kFine;
}
// For tests: from now on a thread that does not know its device cannot learn it.
CANN void fakecann_fail_get_device(int error) {
  device_error = error;
}
CANN int aclrtGetDevice(int32_t* device) {
  if (device_error != kFine) {
    return device_error;
  }
  *device = current_device;
  return has_context ? kFine : kNoContext;
}
CANN int aclrtSetDevice(int32_t device) {
  current_device = device;
  has_context = true;
  return kFine;
}
CANN const char* aclrtGetSocName() {
  return "Ascend910B1";
}
CANN const char* aclGetRecentErrMsg() {
  return "";
}
CANN int aclrtGetCurrentContext(void** context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current_device + 1));
  return has_context ? kFine : kNoContext;
}
CANN int aclrtSetCurrentContext(void* context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context)) - 1);
}
CANN int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) {
    *flags = 0;
  }
  *active = 1;
  return kFine;
}
CANN int aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  *value = 24;
  return kFine;
}
CANN int aclrtGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return kFine;
}
CANN int aclrtCtxGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return kFine;
}
CANN int aclrtGetMemInfo(int, size_t* available, size_t* total) {
  *available = size_t{4} << 30;
  *total = size_t{8} << 30;
  return kFine;
}
CANN int aclrtMalloc(void** data, size_t nbytes, int) {
  return allocate(data, nbytes);
}
CANN int aclrtMallocAlign32(void** data, size_t nbytes, int) {
  return allocate(data, nbytes);
}
CANN int aclrtMallocHost(void** data, size_t nbytes) {
  return allocate(data, nbytes);
}
CANN int aclrtFree(void* data) {
  std::free(data);
  return kFine;
}
CANN int aclrtFreeHost(void* data) {
  std::free(data);
  return kFine;
}
CANN int aclrtMemcpy(void* to, size_t, const void* from, size_t nbytes, int) {
  std::memcpy(to, from, nbytes);
  return kFine;
}
CANN int aclrtMemset(void* data, size_t, int32_t value, size_t nbytes) {
  std::memset(data, value, nbytes);
  return kFine;
}
CANN int aclrtMemcpyAsync(void* to, size_t, const void* from, size_t nbytes, int kind, void* stream) {
  constexpr const char* kinds[] = {"host-to-host", "host-to-device", "device-to-host", "device-to-device"};
  trace(kinds[kind], nbytes, stream);
  stream_of(stream)->push([=] { std::memcpy(to, from, nbytes); });
  return kFine;
}
CANN int aclrtMemsetAsync(void* data, size_t, int32_t value, size_t nbytes, void* stream) {
  stream_of(stream)->push([=] { std::memset(data, value, nbytes); });
  return kFine;
}

// ---- streams, events ----

CANN int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) {
  *stream = make_stream();
  return kFine;
}
CANN int aclrtCreateStream(void** stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}
CANN int aclrtSynchronizeStream(void* stream) {
  trace("synchronize", 0, stream);
  stream_of(stream)->synchronize();
  return kFine;
}
CANN int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}
CANN int aclrtSynchronizeDevice() {
  std::vector<Stream*> all;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    all.assign(streams.begin(), streams.end());
  }
  for (auto* const one : all) {
    one->synchronize();
  }
  return kFine;
}
CANN int aclrtSynchronizeDeviceWithTimeout(int32_t) {
  return aclrtSynchronizeDevice();
}
CANN int aclrtStreamQuery(void* stream, int* status) {
  *status = stream_of(stream)->idle() ? 0 : 1;
  return kFine;
}
CANN int aclrtStreamGetId(void* stream, int32_t* id) {
  *id = static_cast<int32_t>(reinterpret_cast<uintptr_t>(stream) >> 4);
  return kFine;
}
CANN int aclrtCreateEventExWithFlag(void** event, uint32_t) {
  *event = new Event;
  return kFine;
}
CANN int aclrtCreateEventWithFlag(void** event, uint32_t) {
  *event = new Event;
  return kFine;
}
CANN int aclrtRecordEvent(void* event, void* stream) {
  auto* const e = static_cast<Event*>(event);
  uint64_t generation = 0;
  {
    const std::lock_guard<std::mutex> lock(e->mutex);
    generation = ++e->recorded;
  }
  stream_of(stream)->push([=] {
    const std::lock_guard<std::mutex> lock(e->mutex);
    e->reached = std::max(e->reached, generation);
    e->at = Clock::now();
    e->changed.notify_all();
  });
  return kFine;
}
CANN int aclrtStreamWaitEvent(void* stream, void* event) {
  auto* const e = static_cast<Event*>(event);
  stream_of(stream)->push([e, generation = e->last()] { e->wait(generation); });
  return kFine;
}
CANN int aclrtSynchronizeEvent(void* event) {
  auto* const e = static_cast<Event*>(event);
  e->wait(e->last());
  return kFine;
}
CANN int aclrtQueryEventStatus(void* event, int* status) {
  auto* const e = static_cast<Event*>(event);
  const std::lock_guard<std::mutex> lock(e->mutex);
  *status = e->reached >= e->recorded ? 1 : 0;
  return kFine;
}
CANN int aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;
  return kFine;
}
CANN int aclrtEventElapsedTime(float* milliseconds, void* from, void* to) {
  *milliseconds =
      std::chrono::duration<float, std::milli>(static_cast<Event*>(to)->at - static_cast<Event*>(from)->at).count();
  return kFine;
}

// ---- HCCL ----

CANN int HcclGetRootInfo(char* info) {
  static std::atomic<int> made{0};
  std::snprintf(info, 100, "/fakecann_%d_%d", getpid(), made++);
  return kFine;
}
CANN int HcclCommInitRootInfo(uint32_t ranks, const char* info, uint32_t rank, void** communicator) {
  auto made = std::make_unique<Communicator>();
  made->rank = rank;
  std::snprintf(made->name, sizeof(made->name), "%s", info);
  const int file = shm_open(info, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
    return 1;
  }
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) {
    return 1;
  }
  auto* const shared = made->shared = static_cast<Shared*>(memory);
  if (rank == 0) {
    pthread_barrierattr_t between_processes;
    pthread_barrierattr_init(&between_processes);
    pthread_barrierattr_setpshared(&between_processes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &between_processes, ranks);
    shared->ready = 1;
  }
  while (shared->ready == 0) {
    usleep(100);
  }
  pthread_barrier_wait(&shared->barrier);
  if (rank == 0) {
    shm_unlink(info);
  }
  *communicator = made.release();
  trace("communicator", ranks, nullptr);
  return kFine;
}
CANN int HcclCommInitRootInfoConfig(uint32_t ranks, const char* info, uint32_t rank, const void*, void** communicator) {
  return HcclCommInitRootInfo(ranks, info, rank, communicator);
}
// What is queued still uses it, and it is small: it stays until the process ends.
CANN int HcclCommDestroy(void*) {
  trace("destroy", 0, nullptr);
  return kFine;
}
CANN int HcclGetCommAsyncError(void*, int* error) {
  *error = 0;
  return kFine;
}
CANN int HcclGetCommName(void* communicator, char* name) {
  std::strcpy(name, static_cast<Communicator*>(communicator)->name);
  return kFine;
}
// For tests: the next broadcast of this process fails.
CANN void fakecann_fail_broadcast(int error) {
  broadcast_error = error;
}
CANN int HcclBroadcast(void* data, uint64_t count, int type, uint32_t root, void* communicator, void* stream) {
  if (const int error = broadcast_error.exchange(kFine); error != kFine) {
    return error;
  }
  auto* const group = static_cast<Communicator*>(communicator);
  const size_t nbytes = count * item_size(type);
  trace("broadcast", nbytes, stream);
  stream_of(stream)->push([=] {
    for (size_t at = 0; at < nbytes; at += kWindow) {
      const size_t part = std::min(kWindow, nbytes - at);
      if (group->rank == root) {
        std::memcpy(group->shared->window, static_cast<char*>(data) + at, part);
      }
      pthread_barrier_wait(&group->shared->barrier);
      if (group->rank != root) {
        std::memcpy(static_cast<char*>(data) + at, group->shared->window, part);
      }
      pthread_barrier_wait(&group->shared->barrier);
    }
  });
  return kFine;
}
