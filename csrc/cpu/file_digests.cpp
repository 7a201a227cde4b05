#include "file_digests.h"

#include "../checksum.h"
#include "../digest.h"
#include "../strided.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
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

// Whether the elements are in row-major order in the file.
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

// The digest of a region whose elements are in order, updated with one piece of the file after another.
class RegionDigest {
 public:
  RegionDigest(size_t row, MemoryBox box)
      : row_(row), box_(std::move(box)), index_(box_.size.size(), 0), at_(box_.begin) {
  }

  size_t row() const {
    return row_;
  }

  uint64_t value() const {
    return sum_.value();
  }

  // Bytes [begin, end) of the file, which follow those of the call before.
  void update(const char* bytes, int64_t begin, int64_t end) {
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

class FileDigester {
 public:
  FileDigester(
      c10::IntArrayRef descriptors,
      c10::IntArrayRef files,
      const std::vector<RegionCopy>& copies,
      const std::vector<at::ScalarType>& dtypes,
      int64_t piece_bytes,
      bool direct)
      : reader_("digest_files", descriptors, piece_bytes, direct),
        copies_(copies),
        dtypes_(dtypes),
        piece_bytes_(piece_bytes) {
    digests_.assign(copies.size(), Checksum().value()); // of a region without elements
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
    make_groups(spans);
  }

  FileDigests run(int64_t threads) {
    const auto outcome = reader_.run(groups_.size(), threads, [&](size_t group, RangedReader::Worker& worker) {
      return digest_group(groups_[group], worker);
    });
    for (const auto& [row, equal] : duplicates_) {
      digests_[row] = digests_[equal];
    }
    return {std::move(digests_), outcome};
  }

 private:
  void make_groups(const std::vector<Span>& sorted) {
    for (const auto& span : sorted) {
      if (!spans_.empty() && same(spans_.back(), span)) {
        duplicates_.emplace_back(span.row, spans_.back().row);
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

  // False when the file could not be read.
  bool digest_group(const Group& group, RangedReader::Worker& worker) {
    if (group.end - group.begin > piece_bytes_) {
      const auto row = spans_[group.first].row;
      if (group.last - group.first == 1 && converts_row(row) && box_in_bucket(copies_[row]).size.empty()) {
        return convert_in_pieces(group, worker);
      }
      std::vector<RegionDigest> digests;
      for (auto i = group.first; i < group.last; ++i) {
        auto box = box_in_bucket(copies_[spans_[i].row]);
        if (converts_row(spans_[i].row) || !in_order(box)) {
          break;
        }
        digests.emplace_back(spans_[i].row, std::move(box));
      }
      if (digests.size() == group.last - group.first) {
        return digest_in_pieces(group, digests, worker);
      }
    }
    if (worker.load(group.file, group.begin, group.end) == nullptr) {
      return false;
    }
    const auto data = worker.loaded();
    for (auto i = group.first; i < group.last; ++i) {
      auto copy = copies_[spans_[i].row];
      copy.bucket_offset -= group.begin;
      digests_[spans_[i].row] = digest_unpacked(data, copy, dtypes_[spans_[i].row]);
    }
    return true;
  }

  bool digest_in_pieces(const Group& group, std::vector<RegionDigest>& digests, RangedReader::Worker& worker) {
    for (auto begin = group.begin; begin < group.end; begin += piece_bytes_) {
      const auto end = std::min(group.end, begin + piece_bytes_);
      const char* const bytes = worker.load(group.file, begin, end);
      if (bytes == nullptr) {
        return false;
      }
      for (auto& digest : digests) {
        digest.update(bytes, begin, end);
      }
    }
    for (const auto& digest : digests) {
      digests_[digest.row()] = digest.value();
    }
    return true;
  }

  // Of the one region of a group, which is contiguous.
  bool convert_in_pieces(const Group& group, RangedReader::Worker& worker) {
    const auto row = spans_[group.first].row;
    const auto itemsize = static_cast<int64_t>(c10::elementSize(copies_[row].dtype));
    const auto step = std::max<int64_t>(piece_bytes_ / itemsize, 1) * itemsize;
    Checksum sum;
    for (auto begin = group.begin; begin < group.end; begin += step) {
      if (worker.load(group.file, begin, std::min(group.end, begin + step)) == nullptr) {
        return false;
      }
      const auto data = worker.loaded();
      const auto made = converted(data, {0, 0, copies_[row].dtype, {0}, {data.numel() / itemsize}, {1}}, dtypes_[row]);
      sum.update(made.const_data_ptr(), made.nbytes());
    }
    digests_[row] = sum.value();
    return true;
  }

  RangedReader reader_;
  const std::vector<RegionCopy>& copies_;
  const std::vector<at::ScalarType>& dtypes_;
  int64_t piece_bytes_;
  std::vector<Span> spans_;
  std::vector<std::pair<size_t, size_t>> duplicates_; // rows, and rows that have the same digest
  std::vector<Group> groups_;
  std::vector<uint64_t> digests_;
};

} // namespace

FileDigests digest_files(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    const std::vector<RegionCopy>& copies,
    const std::vector<at::ScalarType>& dtypes,
    int64_t threads,
    bool direct,
    int64_t piece_bytes) {
  return FileDigester(descriptors, files, copies, dtypes, piece_bytes, direct).run(threads);
}

namespace {

std::tuple<at::Tensor, int64_t, int64_t, int64_t, int64_t> digest_files_op(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    const at::Tensor& copies,
    int64_t threads,
    bool direct) {
  const FileOrigins from("digest_files", files, offsets, origins, copies);
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), copies, from.offsets);
  const auto found = digest_files(descriptors, from.files, rows, target_dtypes("digest_files", rows), threads, direct);
  return std::tuple_cat(std::make_tuple(as_tensor(found.digests)), found.outcome.as_tuple());
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("digest_files", TORCH_FN(epload::digest_files_op));
}
