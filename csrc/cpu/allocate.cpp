// Memory for the thousands of parameters of a model at once. One by one, allocating them and touching their pages for
// the first time takes as long as reading a checkpoint into them.
#include "threads.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

namespace epload {
namespace {

constexpr size_t kAlignment = 64;   // bytes, as torch's own allocator has it
constexpr size_t kBlock = 32 << 20; // bytes; mapped at once, unless one tensor needs more
constexpr size_t kTask = 8 << 20;   // bytes that a thread touches at once

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Mapped memory, unmapped when its last part is freed.
class Block {
 public:
  explicit Block(size_t nbytes)
      : nbytes_(nbytes), begin_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, begin_ != MAP_FAILED, "allocate_like: cannot allocate ", nbytes, " bytes of memory");
  }
  ~Block() {
    munmap(begin_, nbytes_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* begin() const {
    return static_cast<char*>(begin_);
  }
  size_t nbytes() const {
    return nbytes_;
  }

 private:
  size_t nbytes_;
  void* begin_;
};

// The part of a block that one tensor has.
struct Part {
  std::shared_ptr<Block> block;
  char* begin;
  size_t nbytes;

  // Gives back at once the pages that no other tensor shares, so that one tensor that lives on does not keep the memory
  // of all its neighbors.
  static void free(void* context) {
    const std::unique_ptr<Part> part(static_cast<Part*>(context));
    const auto page = page_size();
    const auto begin = (reinterpret_cast<uintptr_t>(part->begin) + page - 1) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(part->begin + part->nbytes) / page * page;
    if (begin < end && part->block.use_count() > 1) {
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    }
  }
};

size_t aligned(size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Blocks for parts of these sizes, in order; a part is in one block.
std::vector<std::shared_ptr<Block>> map_blocks(const std::vector<size_t>& parts) {
  std::vector<std::shared_ptr<Block>> blocks;
  size_t nbytes = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    nbytes += aligned(parts[i]);
    if (nbytes > 0 && (i + 1 == parts.size() || nbytes + aligned(parts[i + 1]) > kBlock)) {
      blocks.push_back(std::make_shared<Block>(nbytes));
      nbytes = 0;
    }
  }
  return blocks;
}

// Has the kernel provide all pages, in half the time of one page fault for each. Where it cannot, they fault.
void populate(const std::vector<std::shared_ptr<Block>>& blocks, int64_t threads) {
  std::vector<std::pair<char*, size_t>> ranges;
  for (const auto& block : blocks) {
    for (size_t at = 0; at < block->nbytes(); at += kTask) {
      ranges.emplace_back(block->begin() + at, std::min(kTask, block->nbytes() - at));
    }
  }
  Tasks tasks(ranges.size());
  on_threads(threads, tasks, [&] {
    for (auto task = tasks.take(); task < tasks.count(); task = tasks.take()) {
      madvise(ranges[task].first, ranges[task].second, MADV_POPULATE_WRITE);
    }
  });
}

at::Tensor make_tensor(const Part& part, c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::DataPtr data(part.begin, new Part(part), &Part::free, at::kCPU);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), part.nbytes, std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

std::vector<at::Tensor> allocate_on_cpu(at::TensorList like, at::ScalarType dtype, int64_t threads) {
  std::vector<size_t> nbytes;
  nbytes.reserve(like.size());
  for (const auto& tensor : like) {
    nbytes.push_back(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), c10::elementSize(dtype)));
  }
  const auto blocks = map_blocks(nbytes);
  populate(blocks, threads);
  std::vector<at::Tensor> tensors;
  tensors.reserve(like.size());
  auto block = blocks.begin();
  size_t used = 0;
  for (size_t i = 0; i < like.size(); ++i) {
    if (nbytes[i] == 0) {
      tensors.push_back(at::empty_strided(like[i].sizes(), like[i].strides(), at::TensorOptions().dtype(dtype)));
      continue;
    }
    if (used == (*block)->nbytes()) {
      ++block;
      used = 0;
    }
    tensors.push_back(
        make_tensor(Part{*block, (*block)->begin() + used, nbytes[i]}, dtype, like[i].sizes(), like[i].strides()));
    used += aligned(nbytes[i]);
  }
  return tensors;
}

// Uninitialized tensors of these shapes and strides, each with a storage of its own.
std::vector<at::Tensor> allocate_like(at::TensorList like, at::ScalarType dtype, at::Device device, int64_t threads) {
  for (size_t i = 0; i < like.size(); ++i) {
    TORCH_CHECK_VALUE(
        like[i].layout() == at::kStrided,
        "allocate_like: expected dense tensors, tensor ",
        i,
        " is ",
        like[i].layout());
  }
  if (device.is_cpu()) {
    return allocate_on_cpu(like, dtype, threads);
  }
  std::vector<at::Tensor> tensors;
  tensors.reserve(like.size());
  for (const auto& tensor : like) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    tensors.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), options));
  }
  return tensors;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("allocate_like", TORCH_FN(epload::allocate_like));
}
