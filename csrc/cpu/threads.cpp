#include "threads.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

extern "C" __attribute__((weak)) void omp_set_num_threads(int); // of the OpenMP runtime that torch uses

namespace epload {
namespace {

constexpr size_t kMostThreads = 1024; // more than any machine can use here

// Keeps torch's operators in this thread: each thread would start as many threads as the machine has cores.
void use_one_thread() {
  at::get_num_threads(); // the first call in a thread sets the number
  if (omp_set_num_threads != nullptr) {
    omp_set_num_threads(1);
  }
}

} // namespace

void on_threads(int64_t threads, Tasks& tasks, const std::function<void()>& work) {
  std::exception_ptr failure;
  std::mutex lock;
  const auto guarded = [&] {
    try {
      work();
    } catch (...) {
      const std::lock_guard<std::mutex> hold(lock);
      failure = std::current_exception();
      tasks.stop();
    }
  };
  const bool inference = c10::InferenceMode::is_enabled();
  std::vector<std::thread> helpers;
  threads = std::min(threads, static_cast<int64_t>(std::min(tasks.count(), kMostThreads)));
  helpers.reserve(std::max<int64_t>(threads, 0));
  try {
    for (int64_t i = 1; i < threads; ++i) {
      helpers.emplace_back([&] {
        const c10::InferenceMode same_mode(inference);
        const at::NoGradGuard no_grad;
        use_one_thread();
        guarded();
      });
    }
  } catch (const std::exception&) {
    // The machine is out of threads or of memory: those that were started do the work.
  }
  guarded();
  for (auto& helper : helpers) {
    helper.join();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

} // namespace epload
