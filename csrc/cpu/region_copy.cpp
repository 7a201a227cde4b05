// The region copy on CPU: memcpy of contiguous runs, divided among threads by bytes.
#include "../region_copy.h"
#include "../strided.h"
#include "threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace epload {
namespace {

constexpr int64_t kPartBytes = 1 << 20;      // that a thread takes at once
constexpr int64_t kBytesPerThread = 8 << 20; // below this a thread costs more than it saves
constexpr int64_t kStreamTotal = 512 << 10;  // from this on, unpacking bypasses the caches, which it would fill,
constexpr int64_t kStreamRun = 1 << 10;      // for runs of at least this size
constexpr int64_t kTile = 32;                // rows of so many items fit into the nearest cache on both sides

// memcpy that neither fetches the cache lines that it overwrites nor evicts others. Other threads see what it wrote
// after a fence.
void stream_copy(char* to, const char* from, size_t nbytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  nbytes -= head;
  for (; nbytes >= kLine; nbytes -= kLine, to += kLine, from += kLine) {
    __m128i line[4];
    std::memcpy(line, from, kLine);
    for (size_t i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
    }
  }
#endif
  std::memcpy(to, from, nbytes);
}

void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <int64_t kItem>
void copy_items(char* to, const char* from, int64_t count, int64_t to_stride, int64_t from_stride) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kItem);
  }
}

// Rows of items on both sides, and the distances between rows and between items, in bytes.
struct Items {
  int64_t rows, count;
  int64_t to_row, to_item, from_row, from_item;
};

// Tile by tile: where one side is transposed, a cache line that a tile has fetched is used for all of its items.
template <int64_t kItem>
void copy_tiles(char* to, const char* from, const Items& items) {
  for (int64_t first = 0; first < items.rows; first += kTile) {
    const int64_t last = std::min(items.rows, first + kTile);
    for (int64_t begin = 0; begin < items.count; begin += kTile) {
      const int64_t count = std::min(items.count - begin, kTile);
      for (int64_t row = first; row < last; ++row) {
        copy_items<kItem>(
            to + row * items.to_row + begin * items.to_item,
            from + row * items.from_row + begin * items.from_item,
            count,
            items.to_item,
            items.from_item);
      }
    }
  }
}

// `count` rows of dim `dim`, or all of a run without dims. Runs are in bytes.
void copy_rows(
    const Strided& s,
    size_t dim,
    int64_t count,
    char* to,
    const char* from,
    const Dims& to_stride,
    const Dims& from_stride,
    bool stream) {
  if (dim == s.size.size()) {
    stream&& s.run >= kStreamRun ? stream_copy(to, from, s.run) : static_cast<void>(std::memcpy(to, from, s.run));
    return;
  }
  if (const size_t left = s.size.size() - dim; left <= 2) {
    const size_t last = s.size.size() - 1;
    const Items items{
        left == 2 ? count : 1,
        left == 2 ? s.size[last] : count,
        to_stride[dim],
        to_stride[last],
        from_stride[dim],
        from_stride[last]};
    switch (s.run) {
      case 1:
        return copy_tiles<1>(to, from, items);
      case 2:
        return copy_tiles<2>(to, from, items);
      case 4:
        return copy_tiles<4>(to, from, items);
      case 8:
        return copy_tiles<8>(to, from, items);
      default:
        break;
    }
  }
  const int64_t inner = dim + 1 < s.size.size() ? s.size[dim + 1] : 1;
  for (int64_t i = 0; i < count; ++i, to += to_stride[dim], from += from_stride[dim]) {
    copy_rows(s, dim + 1, inner, to, from, to_stride, from_stride, stream);
  }
}

// A region, and the data of its tensor. The form is empty if it converts.
struct Region {
  const RegionCopy& copy;
  const at::Tensor& tensor;
  char* data;
  Strided form;

  bool converts() const {
    return tensor.scalar_type() != copy.dtype;
  }
};

// A part of a region: rows of its outermost dim, or bytes of its only run. All of it if it converts.
struct Part {
  size_t region;
  int64_t begin, end;
};

// Cuts a region into parts; returns its bytes.
int64_t cut(Region& region, size_t index, std::vector<Part>& parts) {
  if (region.converts()) {
    parts.push_back({index, 0, 0});
    return span_of(region.copy);
  }
  auto& s = region.form = collapse(region.tensor, region.copy);
  s.run *= static_cast<int64_t>(region.tensor.element_size());
  int64_t count = s.run, bytes_each = 1; // parts: bytes of a run, or rows
  if (!s.size.empty() && s.run > 0) {
    count = s.size[0];
    bytes_each = s.run;
    for (size_t d = 1; d < s.size.size(); ++d) {
      bytes_each *= s.size[d];
    }
  }
  const int64_t step = std::max<int64_t>(1, kPartBytes / bytes_each);
  for (int64_t begin = 0; begin < count; begin += step) {
    parts.push_back({index, begin, std::min(count, begin + step)});
  }
  return count * bytes_each;
}

void copy_part(const Region& region, const Part& part, char* bucket, Direction direction, bool stream) {
  auto s = region.form;
  char* tensor = region.data + s.tensor + part.begin * (s.size.empty() ? 1 : s.tensor_stride[0]);
  bucket += s.bucket + part.begin * (s.size.empty() ? 1 : s.bucket_stride[0]);
  const int64_t count = part.end - part.begin;
  s.run = s.size.empty() ? count : s.run;
  if (direction == Direction::kUnpack) {
    copy_rows(s, 0, count, tensor, bucket, s.tensor_stride, s.bucket_stride, stream);
  } else {
    copy_rows(s, 0, count, bucket, tensor, s.bucket_stride, s.tensor_stride, stream);
  }
}

// Not in the threads, of which each would copy what is copied on write.
char* data_of(const at::Tensor& tensor, bool written) {
  return static_cast<char*>(written ? tensor.data_ptr() : const_cast<void*>(tensor.const_data_ptr()));
}

void region_copy_cpu(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  const bool unpack = direction == Direction::kUnpack;
  char* const bucket_data = data_of(bucket, !unpack);
  std::vector<Region> regions;
  std::vector<Part> parts;
  int64_t nbytes = 0;
  regions.reserve(copies.size());
  for (const auto& copy : copies) {
    const auto& tensor = tensors[copy.tensor];
    regions.push_back({copy, tensor, data_of(tensor, unpack), {}});
    nbytes += cut(regions.back(), regions.size() - 1, parts);
  }
  const bool stream = nbytes >= kStreamTotal && unpack;
  Tasks tasks(parts.size());
  on_threads(std::clamp<int64_t>(nbytes / kBytesPerThread, 1, at::get_num_threads()), tasks, [&] {
    for (size_t task = 0; (task = tasks.take()) < parts.size();) {
      const auto& region = regions[parts[task].region];
      if (region.converts()) {
        copy_one_aten(bucket, region.tensor, region.copy, direction);
      } else {
        copy_part(region, parts[task], bucket_data, direction, stream);
      }
    }
    stream_fence();
  });
}

const RegisterDriver registered_cpu(c10::DeviceType::CPU, {.region_copy = region_copy_cpu});

} // namespace
} // namespace epload
