#include "file_digests.h"

#include "../checksum.h"
#include "../digest.h"
#include "threads.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <tuple>

namespace epload {
namespace {

constexpr int64_t kPieceBytes = 256 << 10; // read at a time: half of what a small core caches
constexpr int64_t kGapBytes = 4096;        // that is cheaper to read than to skip

// Where a region lies.
struct Span {
  int64_t file, begin, end;
  size_t row;
};

// Spans that are read together.
struct Group {
  size_t first, last;
  int64_t file, begin, end;
};

Span span_of(int64_t file, const RegionCopy& copy, size_t row) {
  int64_t elements = 1;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    if (copy.size[d] == 0) {
      elements = 0;
      break;
    }
    elements += (copy.size[d] - 1) * copy.bucket_stride[d];
  }
  const auto nbytes = elements * static_cast<int64_t>(c10::elementSize(copy.dtype));
  return {file, copy.bucket_offset, copy.bucket_offset + nbytes, row};
}

class Digesting {
 public:
  Digesting(
      c10::IntArrayRef descriptors,
      c10::IntArrayRef files,
      const std::vector<RegionCopy>& copies,
      const std::vector<at::ScalarType>& dtypes)
      : descriptors_(descriptors), copies_(copies), dtypes_(dtypes) {
    std::vector<Span> spans;
    spans.reserve(copies.size());
    found_.digests.assign(copies.size(), Checksum().value()); // of a region without elements
    for (size_t i = 0; i < copies.size(); ++i) {
      TORCH_CHECK_VALUE(
          files[i] >= 0 && files[i] < static_cast<int64_t>(descriptors.size()),
          "digest_files: row ",
          i,
          " names file ",
          files[i],
          " of ",
          descriptors.size());
      const auto span = span_of(files[i], copies[i], i);
      if (span.begin < span.end) {
        spans.push_back(span);
      }
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return std::tie(a.file, a.begin, a.end, a.row) < std::tie(b.file, b.begin, b.end, b.row);
    });
    for (const auto& span : spans) {
      if (!spans_.empty() && same(copies[spans_.back().row], copies[span.row]) && spans_.back().file == span.file &&
          dtypes[spans_.back().row] == dtypes[span.row]) {
        twins_.emplace_back(span.row, spans_.back().row);
        continue;
      }
      spans_.push_back(span);
      if (groups_.empty() || !joins(groups_.back(), span)) {
        groups_.push_back({spans_.size() - 1, spans_.size(), span.file, span.begin, span.end});
      } else {
        groups_.back().last = spans_.size();
        groups_.back().end = std::max(groups_.back().end, span.end);
      }
    }
  }

  FileDigests run(int64_t threads) {
    std::mutex lock;
    Tasks tasks(groups_.size());
    on_threads(threads, tasks, [&] {
      at::Tensor scratch;
      for (size_t i = tasks.take(); i < groups_.size(); i = tasks.take()) {
        ReadOutcome bad;
        if (!digest_group(groups_[i], scratch, bad)) {
          const std::lock_guard<std::mutex> hold(lock);
          found_.outcome = bad;
          tasks.stop();
          return;
        }
      }
    });
    for (const auto& group : groups_) {
      found_.outcome.nbytes += group.end - group.begin;
    }
    for (const auto& [row, twin] : twins_) {
      found_.digests[row] = found_.digests[twin];
    }
    return std::move(found_);
  }

 private:
  static bool same(const RegionCopy& a, const RegionCopy& b) {
    return a.bucket_offset == b.bucket_offset && a.dtype == b.dtype && a.size == b.size &&
           a.bucket_stride == b.bucket_stride;
  }

  static bool joins(const Group& group, const Span& span) {
    return span.file == group.file &&
           (span.begin < group.end || (span.begin - group.end <= kGapBytes && span.end - group.begin <= kPieceBytes));
  }

  // False when the file could not be read; `outcome` then says where.
  bool digest_group(const Group& group, at::Tensor& scratch, ReadOutcome& outcome) {
    const auto nbytes = group.end - group.begin;
    const auto row = spans_[group.first].row;
    const bool alone = group.last - group.first == 1 && copies_[row].dtype == dtypes_[row];
    if (alone && nbytes > kPieceBytes && box_in_bucket(copies_[row]).size.empty()) {
      Checksum sum;
      for (auto at = group.begin; at < group.end; at += kPieceBytes) {
        const auto piece = read(group.file, at, std::min(group.end, at + kPieceBytes), scratch, outcome);
        if (!piece.defined()) {
          return false;
        }
        sum.update(piece.const_data_ptr(), piece.nbytes());
      }
      found_.digests[row] = sum.value();
      return true;
    }
    const auto data = read(group.file, group.begin, group.end, scratch, outcome);
    if (!data.defined()) {
      return false;
    }
    for (auto i = group.first; i < group.last; ++i) {
      auto copy = copies_[spans_[i].row];
      copy.bucket_offset -= group.begin;
      found_.digests[spans_[i].row] = digest_unpacked(data, copy, dtypes_[spans_[i].row]);
    }
    return true;
  }

  // Undefined when the file could not be read.
  at::Tensor read(int64_t file, int64_t begin, int64_t end, at::Tensor& scratch, ReadOutcome& outcome) const {
    constexpr int64_t kLine = 64;
    const auto ahead = begin % kLine; // as far into a line as in the file, where the kernel copies fastest
    if (!scratch.defined() || scratch.numel() < end - begin + kLine) {
      scratch = at::empty({std::max(end - begin, kPieceBytes) + kLine}, at::TensorOptions().dtype(at::kByte));
    }
    const auto data = scratch.narrow(0, ahead, end - begin);
    iovec whole{data.data_ptr(), static_cast<size_t>(end - begin)};
    if (!read_fully(descriptors_, file, begin, &whole, 1, outcome)) {
      return {};
    }
    return data;
  }

  c10::IntArrayRef descriptors_;
  const std::vector<RegionCopy>& copies_;
  const std::vector<at::ScalarType>& dtypes_;
  std::vector<Span> spans_;
  std::vector<std::pair<size_t, size_t>> twins_; // rows that are as another
  std::vector<Group> groups_;
  FileDigests found_;
};

} // namespace

FileDigests digest_files(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    const std::vector<RegionCopy>& copies,
    const std::vector<at::ScalarType>& dtypes,
    int64_t threads) {
  return Digesting(descriptors, files, copies, dtypes).run(threads);
}

} // namespace epload
