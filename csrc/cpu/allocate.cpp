// Memory for the thousands of parameters of a model at once.
#include "threads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

namespace epload {
namespace {

constexpr uintptr_t kTask = 8 << 20; // bytes that a thread touches at once

// Has the kernel provide all pages of tensors on CPU, in half the time of one page fault for each. Where it cannot,
// they fault. Without this, it takes as long as reading a checkpoint into them.
void populate(at::TensorList tensors, int64_t threads) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges; // of pages
  for (const auto& tensor : tensors) {
    const auto memory = reinterpret_cast<uintptr_t>(tensor.storage().data_ptr().get());
    const uintptr_t end = (memory + tensor.storage().nbytes() + page - 1) / page * page;
    uintptr_t begin = memory / page * page;
    if (!ranges.empty() && begin <= ranges.back().second && begin >= ranges.back().first &&
        end - ranges.back().first <= kTask) { // tensors are mostly next to one another
      ranges.back().second = std::max(ranges.back().second, end);
      continue;
    }
    for (; begin < end; begin += kTask) {
      ranges.emplace_back(begin, std::min(end, begin + kTask));
    }
  }
  Tasks tasks(ranges.size());
  on_threads(threads, tasks, [&] {
    for (auto task = tasks.take(); task < tasks.count(); task = tasks.take()) {
      const auto [begin, end] = ranges[task];
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
    }
  });
}

// Uninitialized tensors of these shapes and strides, each with a storage of its own.
std::vector<at::Tensor> allocate_like(at::TensorList like, at::ScalarType dtype, at::Device device, int64_t threads) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    TORCH_CHECK_VALUE(
        like[i].layout() == at::kStrided,
        "allocate_like: expected dense tensors, tensor ",
        i,
        " is ",
        like[i].layout());
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    tensors.push_back(at::empty_strided(like[i].sizes(), like[i].strides(), options));
  }
  if (device.is_cpu()) {
    populate(tensors, threads);
  }
  return tensors;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("allocate_like", TORCH_FN(epload::allocate_like));
}
