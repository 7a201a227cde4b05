// The region copy on CPU: memcpy of contiguous runs, divided among threads by bytes.
#include "../region_copy.h"
#include "regions.h"
#include "stream_copy.h"
#include "threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

namespace epload {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;     // that a thread takes at once
constexpr int64_t kBytesPerThread = 8 << 20; // below this a thread costs more than it saves
constexpr int64_t kStreamTotal = 4 << 20;    // from this on, unpacking bypasses the caches, which it would fill,
constexpr int64_t kStreamRun = 1 << 10;      // for runs of at least this size

template <int64_t kItem>
void copy_items(char* to, const char* from, int64_t count, int64_t to_stride, int64_t from_stride) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kItem);
  }
}

// `stream`: bypass the caches when unpacking.
void copy_run(char* tensor, char* bucket, int64_t nbytes, Direction direction, bool stream) {
  if (stream && direction == Direction::kUnpack && nbytes >= kStreamRun) {
    stream_copy(tensor, bucket, nbytes);
  } else if (direction == Direction::kUnpack) {
    std::memcpy(tensor, bucket, nbytes);
  } else {
    std::memcpy(bucket, tensor, nbytes);
  }
}

// `count` rows of dim `dim`.
void copy_rows(
    const Strided& s, size_t dim, int64_t count, char* tensor, char* bucket, Direction direction, bool stream) {
  const bool unpack = direction == Direction::kUnpack;
  if (dim + 1 == s.size.size() && s.run <= 8) {
    char* const to = unpack ? tensor : bucket;
    const char* const from = unpack ? bucket : tensor;
    const int64_t to_stride = unpack ? s.tensor_stride[dim] : s.bucket_stride[dim];
    const int64_t from_stride = unpack ? s.bucket_stride[dim] : s.tensor_stride[dim];
    switch (s.run) {
      case 1:
        return copy_items<1>(to, from, count, to_stride, from_stride);
      case 2:
        return copy_items<2>(to, from, count, to_stride, from_stride);
      case 4:
        return copy_items<4>(to, from, count, to_stride, from_stride);
      case 8:
        return copy_items<8>(to, from, count, to_stride, from_stride);
      default:
        break;
    }
  }
  for (int64_t i = 0; i < count; ++i, tensor += s.tensor_stride[dim], bucket += s.bucket_stride[dim]) {
    if (dim + 1 == s.size.size()) {
      copy_run(tensor, bucket, s.run, direction, stream);
    } else {
      copy_rows(s, dim + 1, s.size[dim + 1], tensor, bucket, direction, stream);
    }
  }
}

// The parts that Region::copy_part counts: rows of the outermost dim, or bytes.
int64_t parts_of(const Strided& s) {
  return s.run == 0 ? 0 : s.size.empty() ? s.run : s.size[0];
}

int64_t bytes_of_part(const Strided& s) {
  if (s.size.empty()) {
    return 1;
  }
  int64_t nbytes = s.run;
  for (size_t d = 1; d < s.size.size(); ++d) {
    nbytes *= s.size[d];
  }
  return nbytes;
}

} // namespace

Memory memory_of(at::TensorList tensors, const std::vector<RegionCopy>& copies) {
  std::vector<char*> data(tensors.size());
  for (const auto& copy : copies) {
    data[copy.tensor] = static_cast<char*>(tensors[copy.tensor].data_ptr());
  }
  return {std::move(data), tensors};
}

Region::Region(const at::Tensor& tensor, const RegionCopy& copy) : tensor_(copy.tensor) {
  if (tensor.scalar_type() != copy.dtype) {
    converting_ = std::make_unique<const RegionCopy>(copy);
    return;
  }
  strided_ = collapse(tensor, copy);
  strided_.run *= static_cast<int64_t>(tensor.element_size());
}

void Region::copy(
    const at::Tensor& bucket, int64_t skipped, const Memory& memory, Direction direction, bool stream) const {
  if (converts()) {
    auto moved = *converting_;
    moved.bucket_offset -= skipped;
    copy_one_aten(bucket, memory.tensors[tensor_], moved, direction);
    return;
  }
  auto* const begin = static_cast<char*>(bucket.data_ptr()) + (strided_.bucket - skipped);
  copy_part(begin, memory.data[tensor_] + strided_.tensor, 0, parts_of(strided_), direction, stream);
}

void Region::copy_part(char* bucket, char* tensor, int64_t begin, int64_t end, Direction direction, bool stream) const {
  const auto& s = strided_;
  if (s.run == 0) {
    return;
  }
  if (s.size.empty()) {
    copy_run(tensor + begin, bucket + begin, end - begin, direction, stream);
    return;
  }
  tensor += begin * s.tensor_stride[0];
  bucket += begin * s.bucket_stride[0];
  copy_rows(s, 0, end - begin, tensor, bucket, direction, stream);
}

Regions::Regions(at::TensorList tensors, const std::vector<RegionCopy>& copies) {
  regions_.reserve(copies.size());
  pieces_.reserve(copies.size());
  for (const auto& copy : copies) {
    const auto& tensor = tensors[copy.tensor];
    const auto& region = regions_.emplace_back(tensor, copy);
    if (region.converts()) {
      pieces_.push_back({regions_.size() - 1, -1, -1});
      nbytes_ += static_cast<int64_t>(tensor.nbytes());
      continue;
    }
    const int64_t parts = parts_of(region.strided());
    const int64_t nbytes = bytes_of_part(region.strided());
    const int64_t step = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, nbytes));
    for (int64_t begin = 0; begin < parts; begin += step) {
      pieces_.push_back({regions_.size() - 1, begin, std::min(parts, begin + step)});
    }
    nbytes_ += parts * nbytes;
  }
}

void Regions::copy(const at::Tensor& bucket, const Memory& memory, Direction direction) const {
  const bool stream = nbytes_ >= kStreamTotal;
  auto* const base = static_cast<char*>(bucket.data_ptr());
  Tasks tasks(pieces_.size());
  const int64_t threads = std::clamp<int64_t>(nbytes_ / kBytesPerThread, 1, at::get_num_threads());
  on_threads(threads, tasks, [&] {
    for (size_t t = tasks.take(); t < pieces_.size(); t = tasks.take()) {
      const auto& piece = pieces_[t];
      const auto& region = regions_[piece.region];
      if (piece.begin < 0) {
        region.copy(bucket, 0, memory, direction, stream);
      } else {
        char* const tensor = memory.data[region.tensor()] + region.strided().tensor;
        char* const there = base + region.strided().bucket;
        region.copy_part(there, tensor, piece.begin, piece.end, direction, stream);
      }
    }
  });
}

namespace {

void region_copy_cpu(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  Regions(tensors, copies).copy(bucket, memory_of(tensors, copies), direction);
}

const RegisterDriver registered_cpu(c10::DeviceType::CPU, {.region_copy = region_copy_cpu});

} // namespace
} // namespace epload
