#include "runtime.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <tuple>

namespace fakedev {
namespace {

constexpr int kFreed = 0xDB, kFresh = 0xA5; // poison: neither is a plausible number in any dtype

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Trace {
  std::mutex mutex;
  bool on = false;
  std::vector<Traced> seen;
};

Trace& trace() {
  static auto* const one = new Trace; // workers outlive static destructors
  return *one;
}

struct Device {
  std::mutex mutex;
  std::atomic<bool> context = false;
  std::map<int64_t, Queue*> queues;
  int64_t next = 1;
};

Device& device_state(int index) {
  static auto* const all = new Device[kDevices];
  TORCH_CHECK(index >= 0 && index < kDevices, "fakedev has ", kDevices, " devices, asked for ", index);
  return all[index];
}

thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};

} // namespace

void Queue::push(const char* what, std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back({what, std::move(task)});
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  arrived_.notify_one();
}

void Queue::work() {
  pthread_setname_np(pthread_self(), ("fakedev" + std::to_string(device_) + "." + std::to_string(id_)).c_str());
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [&] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.run = nullptr; // what it kept alive goes before anyone is told that it is done
    {
      auto& t = trace();
      const std::lock_guard<std::mutex> traced(t.mutex);
      if (t.on) {
        t.seen.push_back({device_, id_, task.what});
      }
    }
    lock.lock();
    failure_ = failure_ ? failure_ : failure;
    busy_ = false;
    if (tasks_.empty()) {
      done_.notify_all();
    }
  }
}

void Queue::rethrow() {
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(failure, failure_);
  }
  if (!failure) {
    return;
  }
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    TORCH_CHECK(false, "fakedev: work on stream ", id_, " of device ", device_, " failed: ", e.what());
  }
}

void Queue::synchronize() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }
  rethrow();
}

bool Queue::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

bool Queue::drained_within(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return done_.wait_for(
      lock, std::chrono::duration<double>(std::max(0.0, seconds)), [&] { return tasks_.empty() && !busy_; });
}

void Queue::hold() {
  int64_t gate = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    gate = ++gates_;
  }
  push("gate", [this, gate] {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [&] { return open_ >= gate; });
  });
}

void Queue::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = gates_;
  opened_.notify_all();
}

Queue& queue(int device, int64_t id) {
  auto& state = device_state(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  auto& found = state.queues[id];
  if (found == nullptr) {
    found = new Queue(device, id);
  }
  return *found;
}

Queue& queue(const c10::Stream& stream) {
  return queue(stream.device_index(), stream.id());
}

Queue& current() {
  return queue(current_device, current_stream[current_device]);
}

std::vector<Queue*> queues(int device) {
  auto& state = device_state(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::vector<Queue*> all;
  for (const auto& [id, one] : state.queues) {
    all.push_back(one);
  }
  return all;
}

int device() {
  return current_device;
}

void set_device(int device) {
  device_state(device);
  current_device = device;
}

std::vector<int> contexts() {
  std::vector<int> found;
  for (int device = 0; device < kDevices; ++device) {
    if (has_context(device)) {
      found.push_back(device);
    }
  }
  return found;
}

bool has_context(int device) {
  return device_state(device).context;
}

void make_context(int device) {
  device_state(device).context = true;
}

c10::Stream make_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream stream(int device) {
  return make_stream(device, current_stream[device]);
}

void set_stream(const c10::Stream& stream) {
  current_stream[stream.device_index()] = stream.id();
}

c10::Stream new_stream(int device) {
  auto& state = device_state(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  return make_stream(device, state.next++);
}

void Event::record(Queue& on) {
  uint64_t generation = 0;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    generation = ++state_->recorded;
  }
  last_ = &on;
  on.push("event record", [state = state_, generation] {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->reached = std::max(state->reached, generation);
    state->at = now();
    state->changed.notify_all();
  });
}

void Event::block(Queue& waiting) {
  uint64_t generation = 0;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    generation = state_->recorded;
  }
  waiting.push("event wait", [state = state_, generation] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->reached >= generation; });
  });
}

bool Event::done() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->reached >= state_->recorded;
}

void Event::synchronize() {
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->reached >= state_->recorded; });
  }
  if (last_ != nullptr) {
    last_->rethrow();
  }
}

double Event::seconds_since(Event& earlier) {
  return state_->at - earlier.state_->at;
}

void start_trace() {
  auto& t = trace();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.seen.clear();
  t.on = true;
}

std::vector<Traced> stop_trace() {
  auto& t = trace();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.on = false;
  return std::move(t.seen);
}

namespace {

struct Block {
  char* data;
  size_t nbytes;
  int device;
  int64_t stream;
  std::set<int64_t> users; // other streams it was recorded on
};

// What the allocator gets of the system: small blocks share segments, a large one has its own, as torch's.
class Segments {
 public:
  struct Segment {
    char* data;
    size_t nbytes;
    int fd; // other processes map the memory by it
    int device;
    size_t used = 0; // all before has been given out
    int blocks = 0;  // that have not been given back
  };

  char* take(int device, size_t nbytes) {
    auto* segment = nbytes <= kSmall ? &open_[device] : nullptr;
    if (segment == nullptr || *segment == nullptr || (*segment)->used + nbytes > (*segment)->nbytes) {
      auto* const fresh = map(device, nbytes <= kSmall ? kSegment : (nbytes + 4095) / 4096 * 4096);
      if (segment != nullptr && *segment != nullptr && (*segment)->blocks == 0) {
        unmap(*segment);
      }
      if (segment == nullptr) {
        fresh->used = nbytes;
        fresh->blocks = 1;
        return fresh->data;
      }
      *segment = fresh;
    }
    char* const data = (*segment)->data + (*segment)->used;
    (*segment)->used += nbytes;
    (*segment)->blocks += 1;
    return data;
  }

  void give_back(char* data) {
    auto* const segment = find(data);
    if (--segment->blocks == 0) {
      if (open_[segment->device] == segment) {
        open_[segment->device] = nullptr;
      }
      unmap(segment);
    }
  }

  Segment* find(const char* data) {
    auto after = all_.upper_bound(const_cast<char*>(data));
    if (after == all_.begin()) {
      return nullptr;
    }
    auto* const segment = (--after)->second;
    return data < segment->data + segment->nbytes ? segment : nullptr;
  }

 private:
  static constexpr size_t kSmall = 1 << 20, kSegment = 2 << 20;

  Segment* map(int device, size_t nbytes) {
    const int fd = memfd_create("fakedev", MFD_CLOEXEC);
    void* data = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(nbytes)) == 0) {
      data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    TORCH_CHECK(data != MAP_FAILED, "fakedev: out of memory, asked for ", nbytes, " bytes");
    auto* const segment = new Segment{static_cast<char*>(data), nbytes, fd, device};
    all_[segment->data] = segment;
    return segment;
  }

  void unmap(Segment* segment) {
    all_.erase(segment->data);
    munmap(segment->data, segment->nbytes);
    ::close(segment->fd);
    delete segment;
  }

  std::map<char*, Segment*> all_;
  Segment* open_[kDevices] = {};
};

// A caching allocator in CUDA's manner: a freed block serves its own stream again at once, since that stream's order
// keeps the old use before the new one; one recorded on other streams waits for these first.
struct Allocator {
  std::mutex mutex;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> cached; // last freed, first reused
  std::map<void*, Block*> live;
  std::vector<std::pair<Block*, std::vector<Event>>> pending;
  Segments segments;

  void reuse(Block* block) {
    block->users.clear();
    cached[{block->device, block->stream, block->nbytes}].push_back(block);
  }

  void reap() {
    std::erase_if(pending, [&](auto& entry) {
      const bool done = std::all_of(entry.second.begin(), entry.second.end(), [](Event& e) { return e.done(); });
      if (done) {
        reuse(entry.first);
      }
      return done;
    });
  }
};

Allocator& allocator() {
  static auto* const one = new Allocator;
  return *one;
}

void poison(const Block& block, int with) {
  queue(block.device, block.stream).push("poison", [data = block.data, nbytes = block.nbytes, with] {
    std::memset(data, with, nbytes);
  });
}

} // namespace

void* allocate(size_t nbytes) {
  auto& a = allocator();
  const size_t rounded = (std::max<size_t>(nbytes, 1) + 511) / 512 * 512;
  const std::lock_guard<std::mutex> lock(a.mutex);
  a.reap();
  auto& fitting = a.cached[{current_device, current_stream[current_device], rounded}];
  Block* block = nullptr;
  if (!fitting.empty()) {
    block = fitting.back();
    fitting.pop_back();
    poison(*block, kFresh);
  } else {
    auto* const data = a.segments.take(current_device, rounded);
    std::memset(data, kFresh, rounded);
    block = new Block{data, rounded, current_device, current_stream[current_device], {}};
  }
  a.live[block->data] = block;
  return block->data;
}

void deallocate(void* data) {
  auto& a = allocator();
  const std::lock_guard<std::mutex> lock(a.mutex);
  auto* const block = a.live.extract(data).mapped();
  if (block->users.empty()) {
    poison(*block, kFreed);
    a.reuse(block);
    return;
  }
  // Freed for good once every user is done; poisoned then, on the block's stream.
  auto& own = queue(block->device, block->stream);
  std::vector<Event> events;
  for (const auto user : block->users) {
    events.emplace_back().record(queue(block->device, user));
    events.back().block(own);
  }
  poison(*block, kFreed);
  events.emplace_back().record(own);
  a.pending.emplace_back(block, std::move(events));
}

void record_stream(void* data, const c10::Stream& user) {
  auto& a = allocator();
  const std::lock_guard<std::mutex> lock(a.mutex);
  const auto found = a.live.find(data);
  if (found != a.live.end() && found->second->stream != user.id()) {
    found->second->users.insert(user.id());
  }
}

void release_cached() {
  for (auto* const one : queues(current_device)) {
    one->synchronize();
  }
  auto& a = allocator();
  const std::lock_guard<std::mutex> lock(a.mutex);
  a.reap();
  for (auto& [key, blocks] : a.cached) {
    if (std::get<0>(key) == current_device) {
      for (auto* const block : blocks) {
        a.segments.give_back(block->data);
        delete block;
      }
      blocks.clear();
    }
  }
}

namespace {

struct Handle {
  int64_t pid;
  int64_t fd;
  uint64_t inode;
  uint64_t nbytes;
};

struct Mapping {
  uint64_t inode, nbytes;
  int64_t count;
};

// Of memory of other processes. What is opened again has the same address, as with CUDA.
struct Mappings {
  std::mutex mutex;
  std::map<void*, Mapping> all;
};

Mappings& mappings() {
  static auto* const one = new Mappings;
  return *one;
}

} // namespace

bool share(const void* memory, char* handle, uint64_t& base, uint64_t& nbytes) {
  auto& a = allocator();
  const std::lock_guard<std::mutex> lock(a.mutex);
  const auto* const segment = a.segments.find(static_cast<const char*>(memory));
  struct stat facts{};
  if (segment == nullptr || fstat(segment->fd, &facts) != 0) {
    return false;
  }
  const Handle found{getpid(), segment->fd, facts.st_ino, segment->nbytes};
  std::memcpy(handle, &found, sizeof found);
  base = reinterpret_cast<uint64_t>(segment->data);
  nbytes = segment->nbytes;
  return true;
}

void* open(const char* handle) {
  Handle asked{};
  std::memcpy(&asked, handle, sizeof asked);
  if (asked.pid == getpid()) {
    return nullptr;
  }
  const auto path = "/proc/" + std::to_string(asked.pid) + "/fd/" + std::to_string(asked.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  struct stat facts{};
  void* data = MAP_FAILED;
  if (fstat(fd, &facts) == 0 && facts.st_ino == asked.inode) {
    for (auto& [known, mapping] : mappings().all) {
      if (mapping.inode == asked.inode) {
        ++mapping.count;
        data = known;
      }
    }
    if (data == MAP_FAILED) {
      data = mmap(nullptr, asked.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (data != MAP_FAILED) {
        mappings().all[data] = {asked.inode, asked.nbytes, 1};
      }
    }
  }
  ::close(fd);
  return data == MAP_FAILED ? nullptr : data;
}

void close(void* memory) {
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  auto& mapping = mappings().all.at(memory);
  if (--mapping.count == 0) {
    munmap(memory, mapping.nbytes);
    mappings().all.erase(memory);
  }
}

bool drain(double seconds) {
  const double until = now() + seconds;
  bool all = true;
  for (int device = 0; device < kDevices; ++device) {
    for (auto* const one : queues(device)) {
      one->release();
    }
  }
  for (int device = 0; device < kDevices; ++device) {
    for (auto* const one : queues(device)) {
      all &= one->drained_within(until - now());
    }
  }
  return all;
}

} // namespace fakedev
