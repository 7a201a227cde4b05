// The region copy on CPU: memcpy of contiguous runs, spread over threads by bytes.
#include "../region_copy.h"
#include "../strided.h"
#include "stream_copy.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace epload {
namespace {

constexpr int64_t kTaskBytes = 1 << 20;      // one thread's bite
constexpr int64_t kBytesPerThread = 8 << 20; // below this a thread costs more than it saves
constexpr int64_t kStreamTotal = 4 << 20;    // what is unpacked at once goes past the caches if it would fill them,
constexpr int64_t kStreamRun = 1 << 10;      // in runs that are not mostly ends

template <int64_t kItem>
void copy_items(char* to, const char* from, int64_t count, int64_t to_stride, int64_t from_stride) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kItem);
  }
}

// `stream`: past the caches, when unpacking.
void copy_run(char* tensor, char* bucket, int64_t nbytes, Direction direction, bool stream) {
  if (stream && direction == Direction::kUnpack && nbytes >= kStreamRun) {
    stream_copy(tensor, bucket, nbytes);
  } else if (direction == Direction::kUnpack) {
    std::memcpy(tensor, bucket, nbytes);
  } else {
    std::memcpy(bucket, tensor, nbytes);
  }
}

void copy_strided(const Strided& s, size_t dim, char* tensor, char* bucket, Direction direction, bool stream) {
  const bool unpack = direction == Direction::kUnpack;
  if (dim == s.size.size()) {
    copy_run(tensor, bucket, s.run, direction, stream);
    return;
  }
  if (dim + 1 == s.size.size() && s.run <= 8) {
    char* const to = unpack ? tensor : bucket;
    const char* const from = unpack ? bucket : tensor;
    const int64_t to_stride = unpack ? s.tensor_stride[dim] : s.bucket_stride[dim];
    const int64_t from_stride = unpack ? s.bucket_stride[dim] : s.tensor_stride[dim];
    switch (s.run) {
      case 1:
        return copy_items<1>(to, from, s.size[dim], to_stride, from_stride);
      case 2:
        return copy_items<2>(to, from, s.size[dim], to_stride, from_stride);
      case 4:
        return copy_items<4>(to, from, s.size[dim], to_stride, from_stride);
      case 8:
        return copy_items<8>(to, from, s.size[dim], to_stride, from_stride);
      default:
        break;
    }
  }
  for (int64_t i = 0; i < s.size[dim]; ++i) {
    copy_strided(s, dim + 1, tensor + i * s.tensor_stride[dim], bucket + i * s.bucket_stride[dim], direction, stream);
  }
}

// A piece of a region of about kTaskBytes: rows [begin, end) of its outermost dim, or bytes [begin, end) of its one
// run.
struct Task {
  size_t copy;
  int64_t begin, end;
};

void region_copy_cpu(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  char* const base = static_cast<char*>(bucket.data_ptr());
  std::vector<Strided> regions(copies.size());
  std::vector<Task> tasks;
  tasks.reserve(copies.size());
  int64_t total = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto& tensor = tensors[copies[i].tensor];
    if (tensor.scalar_type() != copies[i].dtype) {
      tasks.push_back({i, -1, -1}); // converted through ATen
      total += tensor.nbytes();
      continue;
    }
    auto& s = regions[i] = collapse(base, tensor, copies[i]);
    s.run *= static_cast<int64_t>(tensor.element_size()); // in bytes from here on
    if (s.run == 0) {
      continue;
    }
    int64_t inner = s.run;
    for (size_t d = 1; d < s.size.size(); ++d) {
      inner *= s.size[d];
    }
    const int64_t rows = s.size.empty() ? s.run : s.size[0];
    const int64_t row_bytes = s.size.empty() ? 1 : inner;
    const int64_t step = std::max<int64_t>(1, kTaskBytes / row_bytes);
    for (int64_t begin = 0; begin < rows; begin += step) {
      tasks.push_back({i, begin, std::min(rows, begin + step)});
    }
    total += rows * row_bytes;
  }

  const bool stream = total >= kStreamTotal;
  const auto run_task = [&](const Task& task) {
    if (task.begin < 0) {
      const auto& copy = copies[task.copy];
      copy_one_aten(bucket, tensors[copy.tensor], copy, direction);
      return;
    }
    const auto& s = regions[task.copy];
    if (s.size.empty()) {
      copy_run(s.tensor + task.begin, s.bucket + task.begin, task.end - task.begin, direction, stream);
      return;
    }
    Strided part = s;
    part.size[0] = task.end - task.begin;
    copy_strided(
        part,
        0,
        s.tensor + task.begin * s.tensor_stride[0],
        s.bucket + task.begin * s.bucket_stride[0],
        direction,
        stream);
  };

  const int64_t threads = std::clamp<int64_t>(total / kBytesPerThread, 1, at::get_num_threads());
  if (threads == 1) {
    const StreamFence fence;
    for (const auto& task : tasks) {
      run_task(task);
    }
    return;
  }
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_lock;
  const auto work = [&] {
    const StreamFence fence;
    try {
      // Bites are handed out as threads come free, so that one huge region cannot hold up the rest.
      for (size_t t = next++; t < tasks.size(); t = next++) {
        run_task(tasks[t]);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> hold(failure_lock);
      failure = std::current_exception();
      next = tasks.size();
    }
  };
  const bool inference = c10::InferenceMode::is_enabled();
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    for (int64_t i = 1; i < threads; ++i) {
      helpers.emplace_back([&] {
        const c10::InferenceMode same_mode(inference);
        const at::NoGradGuard no_grad;
        work();
      });
    }
  } catch (const std::system_error&) {
    // The machine is out of threads: those that there are do the work.
  }
  work();
  for (auto& helper : helpers) {
    helper.join();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

const RegisterRegionCopy registered(c10::DeviceType::CPU, region_copy_cpu);

} // namespace
} // namespace epload
