// Reads past the page cache, for bytes that are not in it: the kernel then neither allocates its pages nor copies out
// of them, which on few cores takes longer than a fast disk.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace epload {

constexpr int64_t kDirectAlignment = 4096; // bytes; of offsets, lengths and memory, for any disk and file system

// One open file, opened once more with O_DIRECT when that is first needed. Thread-safe.
class DirectFile {
 public:
  // `descriptor`: of a file that is open for reading, and outlives this.
  explicit DirectFile(int descriptor) : file_(descriptor) {
  }
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  // Whether less than half of these bytes are in the page cache. False where the kernel does not say.
  bool is_cold(int64_t offset, int64_t nbytes) const;

  // A descriptor of the same file with O_DIRECT; -1 where its file system has none, or is none of a local disk.
  int descriptor();

 private:
  int file_;
  std::once_flag opened_;
  int direct_ = -1;
};

} // namespace epload
