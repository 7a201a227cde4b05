// The runtime of a fake asynchronous accelerator, for tests: streams that are worker threads, gates, events, and memory
// that is the host's but is poisoned whenever it changes hands. What is wrong on a real device is wrong here every
// time.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fakedev {

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// One stream: tasks in order on a thread of its own, started with the first. Lives as long as the process.
class Queue {
 public:
  Queue(int device, int64_t id) : device_(device), id_(id) {
  }

  // `what` is for the trace. A task that throws fails the stream; the tasks after it still run, so that nobody who
  // waits for them hangs, and the next host-side wait raises.
  void push(const char* what, std::function<void()> task);
  void synchronize(); // waits until all is done; throws what a task threw, once
  bool idle();
  void hold();    // what is pushed from here on waits for release()
  void release(); // opens every gate so far
  void rethrow();
  bool drained_within(double seconds);

 private:
  struct Task {
    const char* what;
    std::function<void()> run;
  };

  void work();

  const int device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable arrived_, done_, opened_;
  std::deque<Task> tasks_;
  bool started_ = false, busy_ = false;
  int64_t gates_ = 0, open_ = 0;
  std::exception_ptr failure_;
};

Queue& queue(int device, int64_t id);
Queue& queue(const c10::Stream& stream);
Queue& current(); // of the calling thread's current device
std::vector<Queue*> queues(int device);

// The calling thread's current device and stream.
int device();
void set_device(int device);

// Devices on which this process has a context. As CUDA's, made when a thread sets its device, and kept.
std::vector<int> contexts();
bool has_context(int device);
void make_context(int device);
c10::Stream stream(int device);
void set_stream(const c10::Stream& stream);
c10::Stream make_stream(int device, int64_t id);
c10::Stream new_stream(int device);

// As CUDA's: waiting for an event means the work recorded last, at the time of the call.
class Event {
 public:
  void record(Queue& on);
  void block(Queue& waiting);
  bool done();
  void synchronize();
  double seconds_since(Event& earlier);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, reached = 0;
    double at = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  Queue* last_ = nullptr;
};

// What ran, in order of completion, while tracing: device, stream, task.
struct Traced {
  int device;
  int64_t stream;
  std::string what;
};
void start_trace();
std::vector<Traced> stop_trace();

// Memory of the calling thread's current device, for its current stream.
void* allocate(size_t nbytes);
void deallocate(void* data); // the block may serve its own stream again at once, others never
void record_stream(void* data, const c10::Stream& user);
void release_cached(); // waits for the device

// Allocations that other processes map, as CUDA's: a mapping stays when the memory is freed or its process ends; a
// handle does not. Another process alone can open it.
bool share(const void* memory, char* handle, uint64_t& base, uint64_t& nbytes);
void* open(const char* handle); // null if it cannot
void close(void* memory);

// Memory of the host that copies need not wait for; poisoned when it is that no longer.
void pin(void* memory, size_t nbytes);
void unpin(void* memory);

bool drain(double seconds); // opens all gates and waits for all streams
} // namespace fakedev
