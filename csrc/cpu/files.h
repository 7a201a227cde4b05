// Open files that the threads of one op read or write.
#pragma once

#include <c10/util/ArrayRef.h>

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace epload {

constexpr int64_t kDirectAlignment = 4096; // bytes; of offsets, lengths and memory, for any disk and file system
constexpr size_t kVectors = 512;           // of one request

// Bytes moved; the index of the file that failed, or -1; where, in bytes; its errno, 0 if the file ended there.
using Outcome = std::tuple<int64_t, int64_t, int64_t, int64_t>;

// Moves bytes between vectors, which it may change, and what follows byte `offset` of a file. False if that failed.
// Used by one thread.
using Move = std::function<bool(int64_t file, int64_t offset, iovec* vectors, size_t count)>;

class OpenFiles {
 public:
  // `descriptors`: of open files, which outlive this, or -1 for a file that is not used. `direct`: reads of 256 KiB and
  // more of what is not in the page cache go past it: the kernel then neither allocates its pages nor copies out of
  // them, which on few cores takes longer than a fast disk. Throws ValueError, naming `op`, if a number cannot be a
  // descriptor.
  OpenFiles(const char* op, c10::IntArrayRef descriptors, bool direct = false);
  ~OpenFiles();
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;

  Move reader();
  Move writer();

  // Call it once all threads have ended. Of several failures, the one that comes first in the files.
  Outcome outcome() const;

 private:
  using Call = ssize_t (*)(int, const iovec*, int, off_t);

  bool move_all(Call call, int at_end, int64_t file, int64_t offset, iovec* vectors, size_t count);
  bool read_direct(int descriptor, int64_t offset, const iovec* vectors, size_t count, char* buffer);
  int direct_descriptor(int64_t file);

  std::vector<int> descriptors_;
  bool direct_;
  std::mutex mutex_;
  std::map<int64_t, int> opened_; // descriptors of the same files with O_DIRECT; -1 where there is none
  std::atomic<int64_t> nbytes_{0};
  Outcome failure_{0, -1, 0, 0};
};

} // namespace epload
