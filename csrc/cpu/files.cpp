#include "files.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>

namespace epload {
namespace {

constexpr int64_t kDirectBytes = 256 << 10; // shorter reads profit from what the kernel reads ahead
constexpr int64_t kDirectRequest = 4 << 20; // of several threads in turn, these keep a disk as busy as larger ones
constexpr int64_t kCachestat = 451;         // Linux 6.5: https://man7.org/linux/man-pages/man2/cachestat.2.html

struct CachestatRange {
  uint64_t offset, nbytes;
};

struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted; // pages
};

int64_t bytes_of(const iovec* vectors, size_t count) {
  return std::accumulate(vectors, vectors + count, int64_t{0}, [](int64_t sum, const iovec& vector) {
    return sum + static_cast<int64_t>(vector.iov_len);
  });
}

// Whether the page of a byte is in the page cache: a read that may not wait then succeeds.
bool is_cached(int file, int64_t offset) {
  char byte = 0;
  iovec one{&byte, 1};
  return preadv2(file, &one, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

// Whether less than half of these bytes are in the page cache. False where the kernel does not say.
bool is_cold(int file, int64_t offset, int64_t nbytes) {
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  CachestatRange range{static_cast<uint64_t>(offset), static_cast<uint64_t>(nbytes)};
  Cachestat pages{};
  if (syscall(kCachestat, file, &range, &pages, 0) == 0) {
    return pages.cached * page < static_cast<uint64_t>(nbytes) / 2;
  }
  return !is_cached(file, offset) && !is_cached(file, offset + nbytes / 2); // an older kernel, or another user's file
}

// Whether a file is on a disk of this machine. Other file systems may depend on what the kernel reads ahead, and of
// overlayfs the kernel does not say what is cached.
bool is_on_disk(int file) {
  constexpr uint32_t kXfs = 0x58465342; // which older headers lack
  struct statfs status{};
  const auto type = fstatfs(file, &status) == 0 ? static_cast<uint32_t>(status.f_type) : 0;
  return type == EXT4_SUPER_MAGIC || type == kXfs || type == BTRFS_SUPER_MAGIC;
}

} // namespace

OpenFiles::OpenFiles(const char* op, c10::IntArrayRef descriptors, bool direct)
    : descriptors_(descriptors.begin(), descriptors.end()), direct_(direct) {
  for (const auto descriptor : descriptors) {
    TORCH_CHECK_VALUE(
        descriptor >= -1 && descriptor <= std::numeric_limits<int>::max(),
        op,
        ": expected descriptors of open files, or -1, got ",
        descriptor);
  }
}

OpenFiles::~OpenFiles() {
  for (const auto& [file, descriptor] : opened_) {
    if (descriptor >= 0) {
      close(descriptor);
    }
  }
}

Move OpenFiles::reader() {
  // Allocated when first needed, and aligned for O_DIRECT.
  auto buffer = std::make_shared<std::vector<char>>();
  return [this, buffer](int64_t file, int64_t offset, iovec* vectors, size_t count) {
    const int64_t nbytes = direct_ ? bytes_of(vectors, count) : 0;
    if (nbytes >= kDirectBytes && is_cold(descriptors_[file], offset, nbytes)) {
      if (const int descriptor = direct_descriptor(file); descriptor >= 0) {
        buffer->resize(kDirectRequest + kDirectAlignment);
        char* const memory = buffer->data();
        char* const aligned = memory + (kDirectAlignment - reinterpret_cast<uintptr_t>(memory) % kDirectAlignment);
        if (read_direct(descriptor, offset, vectors, count, aligned)) {
          nbytes_ += nbytes;
          return true;
        }
      }
    }
    return move_all(preadv, 0, file, offset, vectors, count);
  };
}

Move OpenFiles::writer() {
  return [this](int64_t file, int64_t offset, iovec* vectors, size_t count) {
    return move_all(pwritev, EIO, file, offset, vectors, count);
  };
}

Outcome OpenFiles::outcome() const {
  auto outcome = failure_;
  std::get<0>(outcome) = nbytes_;
  return outcome;
}

// `at_end`: the error if no byte can be moved.
bool OpenFiles::move_all(Call call, int at_end, int64_t file, int64_t offset, iovec* vectors, size_t count) {
  while (count > 0) {
    const ssize_t moved = call(descriptors_[file], vectors, static_cast<int>(count), offset);
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    if (moved <= 0) {
      const int error = moved < 0 ? errno : at_end;
      const std::lock_guard<std::mutex> hold(mutex_);
      const Outcome failure{0, file, offset, error};
      failure_ = std::get<1>(failure_) < 0 ? failure : std::min(failure_, failure);
      return false;
    }
    offset += moved;
    nbytes_ += moved;
    auto rest = static_cast<size_t>(moved);
    while (count > 0 && rest >= vectors->iov_len) {
      rest -= vectors->iov_len;
      ++vectors;
      --count;
    }
    if (count > 0) {
      vectors->iov_base = static_cast<char*>(vectors->iov_base) + rest;
      vectors->iov_len -= rest;
    }
  }
  return true;
}

// False when anything is amiss, even the end of the file: reading through the page cache may still succeed, or says why
// not. Leaves the vectors as they are. `buffer`: aligned, for kDirectRequest bytes.
bool OpenFiles::read_direct(int descriptor, int64_t offset, const iovec* vectors, size_t count, char* buffer) {
  const int64_t end = offset + bytes_of(vectors, count);
  // Memory that starts as far into a page as the bytes in the file takes whole pages itself.
  char* const only = count == 1 ? static_cast<char*>(vectors->iov_base) : nullptr;
  const bool aligned = only != nullptr && (reinterpret_cast<int64_t>(only) - offset) % kDirectAlignment == 0;
  int64_t filled = 0; // bytes of the first vector
  for (int64_t at = offset; at < end;) {
    const int64_t before = at % kDirectAlignment; // bytes that come along
    const bool in_place = aligned && before == 0 && end - at >= kDirectAlignment;
    const int64_t most = aligned && !in_place ? kDirectAlignment : kDirectRequest;
    const int64_t needed = std::min(before + end - at, most);
    const int64_t pages = (needed + (in_place ? 0 : kDirectAlignment - 1)) / kDirectAlignment * kDirectAlignment;
    const ssize_t got = pread(descriptor, in_place ? only + (at - offset) : buffer, pages, at - before);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    int64_t useful = std::min<int64_t>(got, needed) - before;
    if (useful <= 0) {
      return false;
    }
    at += useful;
    for (const char* from = buffer + before; useful > 0;) {
      const auto part = std::min(useful, static_cast<int64_t>(vectors->iov_len) - filled);
      if (!in_place) {
        std::memcpy(static_cast<char*>(vectors->iov_base) + filled, from, part);
      }
      from += part;
      useful -= part;
      filled += part;
      if (filled == static_cast<int64_t>(vectors->iov_len)) {
        ++vectors;
        filled = 0;
      }
    }
  }
  return true;
}

int OpenFiles::direct_descriptor(int64_t file) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto [entry, is_new] = opened_.try_emplace(file, -1);
  if (is_new && is_on_disk(descriptors_[file])) {
    // The same file, even if another one has its path by now.
    const auto path = "/proc/self/fd/" + std::to_string(descriptors_[file]);
    entry->second = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  }
  return entry->second;
}

} // namespace epload
