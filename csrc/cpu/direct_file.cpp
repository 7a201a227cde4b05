#include "direct_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace epload {
namespace {

// Linux 6.5: https://man7.org/linux/man-pages/man2/cachestat.2.html
constexpr int64_t kCachestat = 451;

struct CachestatRange {
  uint64_t offset, nbytes;
};

struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted; // pages
};

// Whether the page of a byte is in the page cache: a read that may not wait then succeeds.
bool is_cached(int file, int64_t offset) {
  char byte = 0;
  iovec one{&byte, 1};
  return preadv2(file, &one, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

// Whether a file is on a disk of this machine. Other file systems may depend on what the kernel reads ahead, and of
// overlayfs the kernel does not say what is cached.
bool is_on_disk(int file) {
  struct statfs status{};
  if (fstatfs(file, &status) != 0) {
    return false;
  }
  const auto type = static_cast<uint32_t>(status.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC;
}

} // namespace

DirectFile::~DirectFile() {
  if (direct_ >= 0) {
    close(direct_);
  }
}

bool DirectFile::is_cold(int64_t offset, int64_t nbytes) const {
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  CachestatRange range{static_cast<uint64_t>(offset), static_cast<uint64_t>(nbytes)};
  Cachestat pages{};
  if (syscall(kCachestat, file_, &range, &pages, 0) == 0) {
    return pages.cached * page < static_cast<uint64_t>(nbytes) / 2;
  }
  // An older kernel, or another user's file.
  return !is_cached(file_, offset) && !is_cached(file_, offset + nbytes / 2);
}

int DirectFile::descriptor() {
  std::call_once(opened_, [this] {
    if (!is_on_disk(file_)) {
      return;
    }
    // The same file, even if another one has its path by now.
    const auto path = "/proc/self/fd/" + std::to_string(file_);
    direct_ = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  });
  return direct_;
}

} // namespace epload
