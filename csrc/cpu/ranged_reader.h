// Reads byte ranges of open files from a few threads: for reads into tensors, and for digests of what is in files.
#pragma once

#include "direct_file.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <tuple>

namespace epload {

constexpr int64_t kGapBytes = 4096; // a gap that is cheaper to read than to skip
constexpr size_t kVectors = 512;    // of one request

// How it is found out that a store takes long for a request whatever its size.
constexpr size_t kProbes = 8;             // short reads, whose median is what one takes
constexpr int64_t kProbeBytes = 64 << 10; // that a short one has at most
constexpr double kSlowSeconds = 5e-4;     // from which on it is slow: a cold SSD takes less
constexpr double kSlowRate = 256e6;       // bytes/s at which a slow store surely reads on

struct ReadOutcome {
  int64_t nbytes = 0; // that were read, gaps included
  int64_t file = -1;  // index of the file that could not be read; -1 for none
  int64_t offset = 0; // where, in bytes
  int64_t error = 0;  // errno; 0 when the file ended there

  // As the ops return it.
  std::tuple<int64_t, int64_t, int64_t, int64_t> as_tuple() const {
    return {nbytes, file, offset, error};
  }
};

class RangedReader {
 public:
  // One thread's reads, and its scratch buffer.
  class Worker {
   public:
    explicit Worker(const RangedReader& reader) : reader_(reader) {
    }

    // Reads all that the vectors have room for, from byte `offset` of a file; changes the vectors. False when it could
    // not be read: `failure` then says where and why.
    bool read(int64_t file, int64_t offset, iovec* vectors, size_t count);

    // The same, never past the page cache.
    bool read_cached(int64_t file, int64_t offset, iovec* vectors, size_t count);

    // Reads bytes [begin, end) of a file into the scratch buffer; null when they could not be read. They start as far
    // into a cache line as in the file, where the kernel copies fastest.
    const char* load(int64_t file, int64_t begin, int64_t end);

    // What the last load() read.
    at::Tensor loaded() const;

    // Room for at least `nbytes`. Valid until more is asked for.
    const at::Tensor& scratch(int64_t nbytes);

    const ReadOutcome& failure() const {
      return failure_;
    }

    // Bytes that were read.
    int64_t nbytes() const {
      return nbytes_;
    }

   private:
    bool read_direct(int descriptor, int64_t offset, const iovec* vectors, size_t count);

    const RangedReader& reader_;
    at::Tensor scratch_;
    at::Tensor aligned_;          // for reads past the page cache
    int64_t begin_ = 0, end_ = 0; // of what is loaded, in the scratch buffer
    int64_t nbytes_ = 0;
    ReadOutcome failure_;
  };

  // `descriptors`: of open files, or -1 for a file that is not read. They outlive the reader. Scratch buffers have at
  // least `scratch_bytes`. `direct`: large reads of what is not in the page cache go past it. Throws ValueError, naming
  // `op`, if a number cannot be a descriptor.
  RangedReader(const char* op, c10::IntArrayRef descriptors, int64_t scratch_bytes, bool direct);

  // Calls `work` with the numbers of `count` tasks, each once, from up to `threads` threads. It returns false when a
  // read failed, which ends all threads.
  ReadOutcome run(size_t count, int64_t threads, const std::function<bool(size_t task, Worker& worker)>& work) const;

 private:
  c10::IntArrayRef descriptors_;
  int64_t scratch_bytes_;
  mutable std::deque<DirectFile> direct_; // of each file, or none
};

} // namespace epload
