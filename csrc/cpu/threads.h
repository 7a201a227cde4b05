// Work on CPU that a few threads share.
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

  // The number of one that nobody has; `count()` when there is none left.
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

// Calls `work`, which takes tasks, on so many threads, of which the calling one is one, fewer if the machine is out of
// them. What one of them throws stops the tasks and is thrown here when all have ended.
void on_threads(int64_t threads, Tasks& tasks, const std::function<void()>& work);

} // namespace epload
