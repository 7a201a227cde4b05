// Work on CPU shared by a few threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace epload {

// Numbered tasks, taken as threads come free, so that one huge task cannot hold up the rest.
class Tasks {
 public:
  explicit Tasks(size_t count) : count_(count) {
  }

  size_t count() const {
    return count_;
  }

  // The next task; `count()` when there is none left.
  size_t take() {
    return std::min(next_++, count_);
  }

  void stop() {
    next_ = count_;
  }

 private:
  const size_t count_;
  std::atomic<size_t> next_{0};
};

// Calls `work`, which takes tasks, on the calling thread and on `threads` - 1 others, or fewer if the machine is out of
// threads. An exception in one of them stops the tasks and is rethrown here when all threads have ended.
void on_threads(int64_t threads, Tasks& tasks, const std::function<void()>& work);

} // namespace epload
