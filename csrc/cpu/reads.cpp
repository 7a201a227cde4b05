#include "reads.h"

#include "stream_copy.h"
#include "threads.h"

#include <ATen/ops/empty.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <mutex>
#include <tuple>

namespace epload {
namespace {

constexpr int64_t kRequestBytes = 16 << 20;
constexpr size_t kVectors = 512;
constexpr int64_t kScratchBytes = 4 << 20;
constexpr int64_t kStreamBytes = 256 << 10; // what is no longer is read into the cache and streamed from there: the
                                            // kernel copies slowly to memory that is in no cache
constexpr int64_t kSparse = 4;              // a span with less than one useful byte in so many is read in parts,
constexpr int64_t kSparseBytes = 64 << 10;  // if it is longer than this
constexpr size_t kBite = 32;                // requests that a thread takes at once,
constexpr int64_t kBiteBytes = 1 << 20;     // or as many as have so many bytes

} // namespace

void check_descriptors(const char* op, c10::IntArrayRef descriptors) {
  for (const auto descriptor : descriptors) {
    TORCH_CHECK_VALUE(
        descriptor >= -1 && descriptor <= std::numeric_limits<int>::max(),
        op,
        ": expected descriptors of open files, or -1, got ",
        descriptor);
  }
}

bool read_fully(
    c10::IntArrayRef descriptors, int64_t file, int64_t offset, iovec* vectors, size_t count, ReadOutcome& outcome) {
  const auto descriptor = static_cast<int>(descriptors[file]);
  while (count > 0) {
    ssize_t got = count == 1 ? pread(descriptor, vectors->iov_base, vectors->iov_len, offset)
                             : preadv(descriptor, vectors, static_cast<int>(count), offset);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      outcome.file = file;
      outcome.offset = offset;
      outcome.error = got < 0 ? errno : 0;
      return false;
    }
    offset += got;
    while (count > 0 && got >= static_cast<ssize_t>(vectors->iov_len)) {
      got -= static_cast<ssize_t>(vectors->iov_len);
      ++vectors;
      --count;
    }
    if (count > 0) {
      vectors->iov_base = static_cast<char*>(vectors->iov_base) + got;
      vectors->iov_len -= got;
    }
  }
  return true;
}

// What a region wants, in halves along its outermost dims while its span is too large or mostly gaps.
void Reads::want(int64_t file, const at::Tensor& target, const RegionCopy& copy) {
  const auto item = static_cast<int64_t>(c10::elementSize(copy.dtype));
  int64_t elements = 1;
  for (const auto size : copy.size) {
    elements *= size;
  }
  if (elements == 0) {
    return;
  }
  const int64_t span = span_of(copy);
  if (copy.dtype == target.scalar_type()) {
    const auto strided = collapse(target, copy);
    if (strided.size.empty()) {
      wants_.push_back({file, copy.bucket_offset, span, copy.tensor, strided.tensor});
      return;
    }
  }
  if (span > kScratchBytes || (span > kSparseBytes && elements * item * kSparse < span)) {
    size_t widest = copy.size.size(); // the dim whose halves lie farthest apart
    for (size_t d = 0; d < copy.size.size(); ++d) {
      if (copy.size[d] > 1 && (widest == copy.size.size() || copy.bucket_stride[d] > copy.bucket_stride[widest])) {
        widest = d;
      }
    }
    if (widest < copy.size.size()) {
      const int64_t half = copy.size[widest] / 2;
      RegionCopy first = copy, second = copy;
      first.size[widest] = half;
      second.size[widest] -= half;
      second.start[widest] += half;
      second.bucket_offset += half * copy.bucket_stride[widest] * item;
      want(file, target, first);
      want(file, target, second);
      return;
    }
  }
  wants_.push_back({file, copy.bucket_offset, span, -1, static_cast<int64_t>(scattered_.size())});
  scattered_.emplace_back(target, copy);
}

Reads::Reads(c10::IntArrayRef files, int64_t file_count, at::TensorList targets, const std::vector<RegionCopy>& copies)
    : file_count_(file_count) {
  TORCH_CHECK_VALUE(
      files.size() == copies.size(),
      "read_regions: expected a file for each of ",
      copies.size(),
      " rows, got ",
      files.size());
  wants_.reserve(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    TORCH_CHECK_VALUE(
        files[i] >= 0 && files[i] < file_count, "read_regions: row ", i, " names file ", files[i], " of ", file_count);
    want(files[i], targets[copies[i].tensor], copies[i]);
  }
  const auto before = [](const Want& a, const Want& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  };
  if (!std::is_sorted(wants_.begin(), wants_.end(), before)) { // mostly they are, and sorting moves them all
    std::stable_sort(wants_.begin(), wants_.end(), before);
  }
  join();
  deal();
}

// Makes requests of wants that follow one another.
void Reads::join() {
  for (size_t i = 0; i < wants_.size(); ++i) {
    const auto& want = wants_[i];
    if (!requests_.empty()) {
      auto& last = requests_.back();
      const auto& before = wants_[i - 1];
      const int64_t gap = want.offset - before.offset - before.nbytes;
      if (want.tensor >= 0 && before.tensor >= 0 && want.file == before.file && gap >= 0 && gap <= kGapBytes &&
          last.nbytes + gap + want.nbytes <= kRequestBytes && 2 * (last.end - last.begin) + 2 <= kVectors) {
        last.end = i + 1;
        last.nbytes += gap + want.nbytes;
        continue;
      }
    }
    requests_.push_back({i, i + 1, want.nbytes});
  }
}

// Finds where the bites end that threads take.
void Reads::deal() {
  size_t begin = 0;
  int64_t nbytes = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    nbytes += requests_[i].nbytes;
    nbytes_ += requests_[i].nbytes;
    if (i + 1 - begin == kBite || nbytes >= kBiteBytes || i + 1 == requests_.size()) {
      bites_.push_back(i + 1);
      begin = i + 1;
      nbytes = 0;
    }
  }
}

// One thread's.
class Reads::Reader {
 public:
  Reader(const Reads& reads, c10::IntArrayRef descriptors, const Memory& memory)
      : reads_(reads),
        descriptors_(descriptors),
        memory_(memory),
        scratch_(at::empty({kScratchBytes}, at::TensorOptions().dtype(at::kByte))) {
  }

  // False when the file could not be read; `outcome` then says where.
  bool run(const Request& request, ReadOutcome& outcome) {
    const auto& first = reads_.wants_[request.begin];
    vectors_.clear();
    if (first.tensor < 0) {
      vectors_.push_back({scratch_.data_ptr(), static_cast<size_t>(first.nbytes)});
    } else if (kStreams && request.nbytes <= kStreamBytes) {
      return stream(request, outcome);
    } else {
      int64_t at = first.offset;
      for (size_t i = request.begin; i < request.end; ++i) {
        const auto& want = reads_.wants_[i];
        if (want.offset > at) {
          vectors_.push_back({scratch_.data_ptr(), static_cast<size_t>(want.offset - at)});
        }
        vectors_.push_back({place_of(want), static_cast<size_t>(want.nbytes)});
        at = want.offset + want.nbytes;
      }
    }
    if (!fill(first.file, first.offset, outcome)) {
      return false;
    }
    if (first.tensor < 0) {
      const auto read = scratch_.narrow(0, 0, first.nbytes);
      reads_.scattered_[first.at].copy(read, first.offset, memory_, Direction::kUnpack, false);
    }
    return true;
  }

 private:
  char* place_of(const Want& want) const {
    return memory_.data[want.tensor] + want.at;
  }

  bool stream(const Request& request, ReadOutcome& outcome) {
    const auto& first = reads_.wants_[request.begin];
    // As far into a line as in the file, where the kernel copies fastest.
    char* const read = static_cast<char*>(scratch_.data_ptr()) + first.offset % 64;
    vectors_.push_back({read, static_cast<size_t>(request.nbytes)});
    if (!fill(first.file, first.offset, outcome)) {
      return false;
    }
    for (size_t i = request.begin; i < request.end; ++i) {
      const auto& want = reads_.wants_[i];
      stream_copy(place_of(want), read + (want.offset - first.offset), want.nbytes);
    }
    return true;
  }

  bool fill(int64_t file, int64_t offset, ReadOutcome& outcome) {
    return read_fully(descriptors_, file, offset, vectors_.data(), vectors_.size(), outcome);
  }

  const Reads& reads_;
  c10::IntArrayRef descriptors_;
  const Memory& memory_;
  at::Tensor scratch_;
  std::vector<iovec> vectors_;
};

ReadOutcome Reads::run(c10::IntArrayRef descriptors, const Memory& memory, int64_t threads) const {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(descriptors.size()) == file_count_,
      "read_regions: expected ",
      file_count_,
      " descriptors, got ",
      descriptors.size());
  check_descriptors("read_regions", descriptors);
  ReadOutcome outcome;
  outcome.nbytes = nbytes_;
  std::mutex lock;
  Tasks tasks(bites_.size());
  on_threads(threads, tasks, [&] {
    Reader reader(*this, descriptors, memory);
    for (size_t bite = tasks.take(); bite < bites_.size(); bite = tasks.take()) {
      for (size_t i = bite == 0 ? 0 : bites_[bite - 1]; i < bites_[bite]; ++i) {
        ReadOutcome bad;
        if (!reader.run(requests_[i], bad)) {
          const std::lock_guard<std::mutex> hold(lock);
          bad.nbytes = nbytes_;
          outcome = bad;
          tasks.stop();
          return;
        }
      }
    }
  });
  return outcome;
}

} // namespace epload
