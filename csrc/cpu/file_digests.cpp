#include "file_digests.h"

#include "../checksum.h"
#include "../digest.h"
#include "../strided.h"
#include "threads.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <tuple>
#include <utility>

namespace epload {
namespace {

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

// Whether the elements come in their row-major order as the file is read.
bool in_order(const MemoryBox& box) {
  int64_t extent = box.run;
  for (size_t d = box.size.size(); d-- > 0;) {
    if (box.stride[d] < extent) {
      return false;
    }
    extent += (box.size[d] - 1) * box.stride[d];
  }
  return true;
}

// The digest of a region whose elements are in order, while pieces of the file go by.
class Passing {
 public:
  Passing(size_t row, MemoryBox box) : row_(row), box_(std::move(box)), index_(box_.size.size(), 0), at_(box_.begin) {
  }

  size_t row() const {
    return row_;
  }

  uint64_t value() const {
    return sum_.value();
  }

  // Bytes [begin, end) of the file, which follow those before.
  void pass(const char* bytes, int64_t begin, int64_t end) {
    while (!ended_ && at_ + done_ < end) {
      const auto nbytes = std::min(box_.run - done_, end - at_ - done_);
      sum_.update(bytes + (at_ + done_ - begin), nbytes);
      done_ += nbytes;
      if (done_ == box_.run) {
        done_ = 0;
        next_run();
      }
    }
  }

 private:
  void next_run() {
    for (size_t d = index_.size(); d-- > 0;) {
      at_ += box_.stride[d];
      if (++index_[d] < box_.size[d]) {
        return;
      }
      at_ -= box_.size[d] * box_.stride[d];
      index_[d] = 0;
    }
    ended_ = true;
  }

  size_t row_;
  MemoryBox box_;
  Dims index_;       // of the run
  int64_t at_;       // where it begins
  int64_t done_ = 0; // bytes of it
  bool ended_ = false;
  Checksum sum_;
};

class Digesting {
 public:
  Digesting(
      c10::IntArrayRef descriptors,
      c10::IntArrayRef files,
      const std::vector<RegionCopy>& copies,
      const std::vector<at::ScalarType>& dtypes,
      int64_t piece_bytes)
      : descriptors_(descriptors), copies_(copies), dtypes_(dtypes), piece_bytes_(piece_bytes) {
    check_descriptors("digest_files", descriptors);
    found_.digests.assign(copies.size(), Checksum().value()); // of a region without elements
    std::vector<Span> spans;
    spans.reserve(copies.size());
    for (size_t i = 0; i < copies.size(); ++i) {
      TORCH_CHECK_VALUE(
          files[i] >= 0 && files[i] < static_cast<int64_t>(descriptors.size()),
          "digest_files: row ",
          i,
          " names file ",
          files[i],
          " of ",
          descriptors.size());
      if (const auto nbytes = span_of(copies[i]); nbytes > 0) {
        spans.push_back({files[i], copies[i].bucket_offset, copies[i].bucket_offset + nbytes, i});
      }
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return std::tie(a.file, a.begin, a.end, a.row) < std::tie(b.file, b.begin, b.end, b.row);
    });
    for (const auto& span : spans) {
      if (!spans_.empty() && same(spans_.back(), span)) {
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
    found_.outcome.nbytes = nbytes_;
    for (const auto& [row, twin] : twins_) {
      found_.digests[row] = found_.digests[twin];
    }
    return std::move(found_);
  }

 private:
  // Whether two spans are of equal regions that become equal shards.
  bool same(const Span& one, const Span& other) const {
    const auto &a = copies_[one.row], &b = copies_[other.row];
    return one.file == other.file && a.bucket_offset == b.bucket_offset && a.dtype == b.dtype && a.size == b.size &&
           a.bucket_stride == b.bucket_stride && dtypes_[one.row] == dtypes_[other.row];
  }

  bool joins(const Group& group, const Span& span) const {
    return span.file == group.file &&
           (span.begin < group.end || (span.begin - group.end <= kGapBytes && span.end - group.begin <= piece_bytes_));
  }

  bool converts_row(size_t row) const {
    return converts(copies_[row], dtypes_[row]);
  }

  // False when the file could not be read; `outcome` then says where.
  bool digest_group(const Group& group, at::Tensor& scratch, ReadOutcome& outcome) {
    if (group.end - group.begin > piece_bytes_) {
      const auto row = spans_[group.first].row;
      if (group.last - group.first == 1 && converts_row(row) && box_in_bucket(copies_[row]).size.empty()) {
        return convert_in_pieces(group, scratch, outcome);
      }
      std::vector<Passing> passing;
      for (auto i = group.first; i < group.last; ++i) {
        auto box = box_in_bucket(copies_[spans_[i].row]);
        if (converts_row(spans_[i].row) || !in_order(box)) {
          break;
        }
        passing.emplace_back(spans_[i].row, std::move(box));
      }
      if (passing.size() == group.last - group.first) {
        return digest_in_pieces(group, passing, scratch, outcome);
      }
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

  bool digest_in_pieces(const Group& group, std::vector<Passing>& passing, at::Tensor& scratch, ReadOutcome& outcome) {
    for (auto begin = group.begin; begin < group.end; begin += piece_bytes_) {
      const auto end = std::min(group.end, begin + piece_bytes_);
      const auto data = read(group.file, begin, end, scratch, outcome);
      if (!data.defined()) {
        return false;
      }
      for (auto& each : passing) {
        each.pass(static_cast<const char*>(data.const_data_ptr()), begin, end);
      }
    }
    for (const auto& each : passing) {
      found_.digests[each.row()] = each.value();
    }
    return true;
  }

  // Of the one region of a group, which is contiguous.
  bool convert_in_pieces(const Group& group, at::Tensor& scratch, ReadOutcome& outcome) {
    const auto row = spans_[group.first].row;
    const auto itemsize = static_cast<int64_t>(c10::elementSize(copies_[row].dtype));
    const auto step = std::max<int64_t>(piece_bytes_ / itemsize, 1) * itemsize;
    Checksum sum;
    for (auto begin = group.begin; begin < group.end; begin += step) {
      const auto data = read(group.file, begin, std::min(group.end, begin + step), scratch, outcome);
      if (!data.defined()) {
        return false;
      }
      const auto made = converted(data, {0, 0, copies_[row].dtype, {0}, {data.numel() / itemsize}, {1}}, dtypes_[row]);
      sum.update(made.const_data_ptr(), made.nbytes());
    }
    found_.digests[row] = sum.value();
    return true;
  }

  // Undefined when the file could not be read.
  at::Tensor read(int64_t file, int64_t begin, int64_t end, at::Tensor& scratch, ReadOutcome& outcome) {
    constexpr int64_t kLine = 64;
    const auto ahead = begin % kLine; // as far into a line as in the file, where the kernel copies fastest
    if (!scratch.defined() || scratch.numel() < end - begin + kLine) {
      scratch = at::empty({std::max(end - begin, piece_bytes_) + kLine}, at::TensorOptions().dtype(at::kByte));
    }
    const auto data = scratch.narrow(0, ahead, end - begin);
    iovec whole{data.data_ptr(), static_cast<size_t>(end - begin)};
    if (!read_fully(descriptors_, file, begin, &whole, 1, outcome)) {
      return {};
    }
    nbytes_ += end - begin;
    return data;
  }

  c10::IntArrayRef descriptors_;
  const std::vector<RegionCopy>& copies_;
  const std::vector<at::ScalarType>& dtypes_;
  int64_t piece_bytes_;
  std::vector<Span> spans_;
  std::vector<std::pair<size_t, size_t>> twins_; // rows that are as another
  std::vector<Group> groups_;
  std::atomic<int64_t> nbytes_{0}; // that were read
  FileDigests found_;
};

} // namespace

FileDigests digest_files(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    const std::vector<RegionCopy>& copies,
    const std::vector<at::ScalarType>& dtypes,
    int64_t threads,
    int64_t piece_bytes) {
  return Digesting(descriptors, files, copies, dtypes, piece_bytes).run(threads);
}

} // namespace epload
