#include "../region_read.h"
#include "../strided.h"
#include "stream_copy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace epload {
namespace {

constexpr int64_t kRequestBytes = 16 << 20;
constexpr size_t kVectors = 512;
constexpr int64_t kScratchBytes = 4 << 20;
constexpr int64_t kStreamBytes = 256 << 10; // what is no longer is read into the cache and streamed from there: the
                                            // kernel copies slowly to memory that is in no cache
constexpr int64_t kGapBytes = 4096;         // a gap that is cheaper to read than to skip
constexpr int64_t kSparse = 4;              // a span with less than one useful byte in so many is read in parts,
constexpr int64_t kSparseBytes = 64 << 10;  // if it is longer than this
constexpr size_t kBite = 32;                // requests that a thread takes at once,
constexpr int64_t kBiteBytes = 1 << 20;     // or as many as have so many bytes

// Bytes of one file that are wanted: in one run at `to`, or, if `to` is null, through a scratch buffer, as copy `copy`.
struct Want {
  int64_t file, offset, nbytes;
  char* to;
  size_t copy;
};

struct Wants {
  std::vector<Want> all;
  std::vector<RegionCopy> copies; // of those that go through a scratch buffer
};

int64_t span_of(const RegionCopy& copy) {
  int64_t elements = 1;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    elements += (copy.size[d] - 1) * copy.bucket_stride[d];
  }
  return elements * static_cast<int64_t>(c10::elementSize(copy.dtype));
}

// Adds what a region wants, in halves along its outermost dims while its span is too large or mostly gaps.
void add_wants(Wants& wants, int64_t file, const at::Tensor& target, const RegionCopy& copy) {
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
    const auto strided = collapse(nullptr, target, copy);
    if (strided.size.empty()) {
      wants.all.push_back({file, copy.bucket_offset, span, strided.tensor, 0});
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
      add_wants(wants, file, target, first);
      add_wants(wants, file, target, second);
      return;
    }
  }
  wants.all.push_back({file, copy.bucket_offset, span, nullptr, wants.copies.size()});
  wants.copies.push_back(copy);
}

struct Request {
  size_t begin, end; // wants
  int64_t nbytes;
};

std::vector<Request> requests_of(const std::vector<Want>& wants) {
  std::vector<Request> requests;
  for (size_t i = 0; i < wants.size(); ++i) {
    const auto& want = wants[i];
    if (!requests.empty()) {
      auto& last = requests.back();
      const auto& before = wants[i - 1];
      const int64_t gap = want.offset - before.offset - before.nbytes;
      if (want.to != nullptr && before.to != nullptr && want.file == before.file && gap >= 0 && gap <= kGapBytes &&
          last.nbytes + gap + want.nbytes <= kRequestBytes && 2 * (last.end - last.begin) + 2 <= kVectors) {
        last.end = i + 1;
        last.nbytes += gap + want.nbytes;
        continue;
      }
    }
    requests.push_back({i, i + 1, want.nbytes});
  }
  return requests;
}

// Where the bites end that threads take, as numbers of requests.
std::vector<size_t> bites_of(const std::vector<Request>& requests) {
  std::vector<size_t> ends;
  size_t begin = 0;
  int64_t nbytes = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    nbytes += requests[i].nbytes;
    if (i + 1 - begin == kBite || nbytes >= kBiteBytes || i + 1 == requests.size()) {
      ends.push_back(i + 1);
      begin = i + 1;
      nbytes = 0;
    }
  }
  return ends;
}

class Reader {
 public:
  Reader(c10::IntArrayRef descriptors, at::TensorList targets, const Wants& wants)
      : descriptors_(descriptors),
        targets_(targets),
        wants_(wants.all),
        copies_(wants.copies),
        scratch_(at::empty({kScratchBytes}, at::TensorOptions().dtype(at::kByte))) {
  }

  // False when the file could not be read; `outcome` then says where.
  bool run(const Request& request, ReadOutcome& outcome) {
    const auto& first = wants_[request.begin];
    vectors_.clear();
    if (first.to == nullptr) {
      vectors_.push_back({scratch_.data_ptr(), static_cast<size_t>(first.nbytes)});
    } else if (kStreams && request.nbytes <= kStreamBytes) {
      return stream(request, outcome);
    } else {
      int64_t at = first.offset;
      for (size_t i = request.begin; i < request.end; ++i) {
        const auto& want = wants_[i];
        if (want.offset > at) {
          vectors_.push_back({scratch_.data_ptr(), static_cast<size_t>(want.offset - at)});
        }
        vectors_.push_back({want.to, static_cast<size_t>(want.nbytes)});
        at = want.offset + want.nbytes;
      }
    }
    if (!fill(first.file, first.offset, outcome)) {
      return false;
    }
    if (first.to == nullptr) {
      auto copy = copies_[first.copy];
      copy.bucket_offset = 0;
      region_copy(scratch_.narrow(0, 0, first.nbytes), targets_, {copy}, Direction::kUnpack);
    }
    return true;
  }

 private:
  bool stream(const Request& request, ReadOutcome& outcome) {
    const auto& first = wants_[request.begin];
    // As far into a line as in the file, where the kernel copies fastest.
    char* const read = static_cast<char*>(scratch_.data_ptr()) + first.offset % 64;
    vectors_.push_back({read, static_cast<size_t>(request.nbytes)});
    if (!fill(first.file, first.offset, outcome)) {
      return false;
    }
    for (size_t i = request.begin; i < request.end; ++i) {
      const auto& want = wants_[i];
      stream_copy(want.to, read + (want.offset - first.offset), want.nbytes);
    }
    return true;
  }

  bool fill(int64_t file, int64_t offset, ReadOutcome& outcome) {
    auto* vector = vectors_.data();
    auto count = vectors_.size();
    while (count > 0) {
      const auto descriptor = static_cast<int>(descriptors_[file]);
      ssize_t got = count == 1 ? pread(descriptor, vector->iov_base, vector->iov_len, offset)
                               : preadv(descriptor, vector, static_cast<int>(count), offset);
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
      while (count > 0 && got >= static_cast<ssize_t>(vector->iov_len)) {
        got -= static_cast<ssize_t>(vector->iov_len);
        ++vector;
        --count;
      }
      if (count > 0) {
        vector->iov_base = static_cast<char*>(vector->iov_base) + got;
        vector->iov_len -= got;
      }
    }
    return true;
  }

  c10::IntArrayRef descriptors_;
  at::TensorList targets_;
  const std::vector<Want>& wants_;
  const std::vector<RegionCopy>& copies_;
  at::Tensor scratch_;
  std::vector<iovec> vectors_;
};

} // namespace

ReadOutcome region_read(
    c10::IntArrayRef descriptors,
    c10::IntArrayRef files,
    at::TensorList targets,
    const std::vector<RegionCopy>& copies,
    int64_t threads) {
  TORCH_CHECK_VALUE(
      files.size() == copies.size(),
      "region_read: expected a file for each of ",
      copies.size(),
      " rows, got ",
      files.size());
  Wants wants;
  wants.all.reserve(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    TORCH_CHECK_VALUE(
        files[i] >= 0 && files[i] < static_cast<int64_t>(descriptors.size()),
        "region_read: row ",
        i,
        " names file ",
        files[i],
        " of ",
        descriptors.size());
    add_wants(wants, files[i], targets[copies[i].tensor], copies[i]);
  }
  const auto before = [](const Want& a, const Want& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  };
  if (!std::is_sorted(wants.all.begin(), wants.all.end(), before)) { // mostly they are, and sorting moves them all
    std::stable_sort(wants.all.begin(), wants.all.end(), before);
  }
  const auto requests = requests_of(wants.all);
  const auto bites = bites_of(requests);

  ReadOutcome outcome;
  for (const auto& request : requests) {
    outcome.nbytes += request.nbytes;
  }
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex lock;
  const auto work = [&] {
    const StreamFence fence;
    try {
      Reader reader(descriptors, targets, wants);
      for (size_t bite = next++; bite < bites.size(); bite = next++) {
        for (size_t i = bite == 0 ? 0 : bites[bite - 1]; i < bites[bite]; ++i) {
          ReadOutcome bad;
          if (!reader.run(requests[i], bad)) {
            const std::lock_guard<std::mutex> hold(lock);
            bad.nbytes = outcome.nbytes;
            outcome = bad;
            next = bites.size();
            return;
          }
        }
      }
    } catch (...) {
      const std::lock_guard<std::mutex> hold(lock);
      failure = std::current_exception();
      next = bites.size();
    }
  };
  const bool inference = c10::InferenceMode::is_enabled();
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = 1; i < threads && static_cast<size_t>(i) < bites.size(); ++i) {
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
  return outcome;
}

} // namespace epload
