#include "ranged_reader.h"

#include "threads.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <mutex>

namespace epload {
namespace {

constexpr int64_t kCacheLine = 64;

} // namespace

bool RangedReader::Worker::read(int64_t file, int64_t offset, iovec* vectors, size_t count) {
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

RangedReader::RangedReader(const char* op, c10::IntArrayRef descriptors, int64_t scratch_bytes)
    : descriptors_(descriptors), scratch_bytes_(scratch_bytes) {
  for (const auto descriptor : descriptors) {
    TORCH_CHECK_VALUE(
        descriptor >= -1 && descriptor <= std::numeric_limits<int>::max(),
        op,
        ": expected descriptors of open files, or -1, got ",
        descriptor);
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
