#include "ranged_reader.h"

#include "threads.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>

namespace epload {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kDirectBytes = 256 << 10; // shorter reads profit from what the kernel reads ahead
constexpr int64_t kDirectRequest = 4 << 20; // of several threads in turn, these keep a disk as busy as larger ones

int64_t bytes_of(const iovec* vectors, size_t count) {
  return std::accumulate(vectors, vectors + count, int64_t{0}, [](int64_t sum, const iovec& vector) {
    return sum + static_cast<int64_t>(vector.iov_len);
  });
}

// Fills vectors with bytes from one place after another.
class Scatter {
 public:
  explicit Scatter(const iovec* vectors) : vector_(vectors) {
  }

  // The next bytes are there already, within one vector.
  void skip(int64_t nbytes) {
    filled_ += nbytes;
    if (filled_ == static_cast<int64_t>(vector_->iov_len)) {
      ++vector_;
      filled_ = 0;
    }
  }

  void add(const char* bytes, int64_t nbytes) {
    while (nbytes > 0) {
      const auto some = std::min(nbytes, static_cast<int64_t>(vector_->iov_len) - filled_);
      std::memcpy(static_cast<char*>(vector_->iov_base) + filled_, bytes, some);
      bytes += some;
      nbytes -= some;
      filled_ += some;
      if (filled_ == static_cast<int64_t>(vector_->iov_len)) {
        ++vector_;
        filled_ = 0;
      }
    }
  }

 private:
  const iovec* vector_;
  int64_t filled_ = 0;
};

} // namespace

bool RangedReader::Worker::read(int64_t file, int64_t offset, iovec* vectors, size_t count) {
  if (!reader_.direct_.empty()) {
    const auto nbytes = bytes_of(vectors, count);
    auto& direct = reader_.direct_[file];
    if (nbytes >= kDirectBytes && direct.is_cold(offset, nbytes) && direct.descriptor() >= 0 &&
        read_direct(direct.descriptor(), offset, vectors, count)) {
      nbytes_ += nbytes;
      return true;
    }
  }
  return read_cached(file, offset, vectors, count);
}

// False when anything is amiss, even the end of the file: reading through the page cache may still succeed, or says why
// not. Leaves the vectors as they are.
bool RangedReader::Worker::read_direct(int descriptor, int64_t offset, const iovec* vectors, size_t count) {
  if (!aligned_.defined()) {
    aligned_ = at::empty({kDirectRequest + kDirectAlignment}, at::TensorOptions().dtype(at::kByte));
  }
  auto* const memory = static_cast<char*>(aligned_.data_ptr());
  char* const buffer = memory + (kDirectAlignment - reinterpret_cast<uintptr_t>(memory) % kDirectAlignment);
  const int64_t end = offset + bytes_of(vectors, count);
  // Memory that starts as far into a page as the bytes in the file takes whole pages itself.
  auto* const only = count == 1 ? static_cast<char*>(vectors->iov_base) : nullptr;
  const bool in_place = only != nullptr && (reinterpret_cast<int64_t>(only) - offset) % kDirectAlignment == 0;
  Scatter scatter(vectors);
  for (int64_t at = offset; at < end;) {
    if (const int64_t pages = (end - at) / kDirectAlignment * kDirectAlignment;
        in_place && at % kDirectAlignment == 0 && pages > 0) {
      const ssize_t got = pread(descriptor, only + (at - offset), std::min(pages, kDirectRequest), at);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got <= 0) {
        return false;
      }
      scatter.skip(got);
      at += got;
      continue;
    }
    const int64_t skipped = at % kDirectAlignment; // bytes before, which come along
    const int64_t wanted = std::min(skipped + end - at, in_place ? kDirectAlignment : kDirectRequest);
    const int64_t whole = (wanted + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    const ssize_t got = pread(descriptor, buffer, whole, at - skipped);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= skipped) {
      return false;
    }
    const int64_t useful = std::min(static_cast<int64_t>(got), wanted) - skipped;
    scatter.add(buffer + skipped, useful);
    at += useful;
  }
  return true;
}

bool RangedReader::Worker::read_cached(int64_t file, int64_t offset, iovec* vectors, size_t count) {
  const auto descriptor = static_cast<int>(reader_.descriptors_[file]);
  while (count > 0) {
    ssize_t got = count == 1 ? pread(descriptor, vectors->iov_base, vectors->iov_len, offset)
                             : preadv(descriptor, vectors, static_cast<int>(count), offset);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      failure_ = {0, file, offset, got < 0 ? errno : 0};
      return false;
    }
    offset += got;
    nbytes_ += got;
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

const char* RangedReader::Worker::load(int64_t file, int64_t begin, int64_t end) {
  begin_ = begin % kCacheLine;
  end_ = begin_ + end - begin;
  char* const bytes = static_cast<char*>(scratch(end_).data_ptr()) + begin_;
  iovec whole{bytes, static_cast<size_t>(end - begin)};
  return read(file, begin, &whole, 1) ? bytes : nullptr;
}

at::Tensor RangedReader::Worker::loaded() const {
  return scratch_.narrow(0, begin_, end_ - begin_);
}

const at::Tensor& RangedReader::Worker::scratch(int64_t nbytes) {
  if (!scratch_.defined() || scratch_.numel() < nbytes) {
    const auto room = std::max(nbytes, reader_.scratch_bytes_ + kCacheLine);
    scratch_ = at::empty({room}, at::TensorOptions().dtype(at::kByte));
  }
  return scratch_;
}

RangedReader::RangedReader(const char* op, c10::IntArrayRef descriptors, int64_t scratch_bytes, bool direct)
    : descriptors_(descriptors), scratch_bytes_(scratch_bytes) {
  for (const auto descriptor : descriptors) {
    TORCH_CHECK_VALUE(
        descriptor >= -1 && descriptor <= std::numeric_limits<int>::max(),
        op,
        ": expected descriptors of open files, or -1, got ",
        descriptor);
    if (direct) {
      direct_.emplace_back(static_cast<int>(descriptor));
    }
  }
}

ReadOutcome RangedReader::run(
    size_t count, int64_t threads, const std::function<bool(size_t task, Worker& worker)>& work) const {
  ReadOutcome outcome;
  int64_t nbytes = 0;
  std::mutex lock;
  Tasks tasks(count);
  on_threads(threads, tasks, [&] {
    Worker worker(*this);
    bool fine = true;
    for (size_t task = 0; fine && (task = tasks.take()) < count;) {
      fine = work(task, worker);
    }
    const std::lock_guard<std::mutex> hold(lock);
    nbytes += worker.nbytes();
    if (!fine) {
      outcome = worker.failure();
      tasks.stop();
    }
  });
  outcome.nbytes = nbytes;
  return outcome;
}

} // namespace epload
