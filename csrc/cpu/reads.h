// Reads files into memory: byte ranges into a buffer, and regions straight into tensors on CPU, which is the region
// copy with files in place of the bucket.
#pragma once

#include "ranged_reader.h"
#include "regions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace epload {

// Bytes of a file, and where in a buffer they go.
struct FileRange {
  int64_t file, offset, at, nbytes;
};

// What is read from some files, worked out once. A region that is contiguous in the file and in its tensor
// is read there directly, in one request with its neighbors; others go through a small buffer of each thread. So do
// short requests on x86, as that is faster than the kernel's own copy.
class Reads {
 public:
  // Copy i reads from file `files[i]` of `file_count`, with its bucket_offset counted from the start of the file. Only
  // the layouts of the targets are used.
  Reads(c10::IntArrayRef files, int64_t file_count, at::TensorList targets, const std::vector<RegionCopy>& copies);

  // Ranges of `file_count` files, into one buffer, which is tensor 0 of the memory.
  Reads(const std::vector<FileRange>& ranges, int64_t file_count);

  // From open files. `direct`: see RangedReader.
  ReadOutcome run(c10::IntArrayRef descriptors, const Memory& memory, int64_t threads, bool direct) const;

 private:
  // Bytes of one file: one run at byte `at` of a tensor's data, or, if `tensor` is negative, what scattered region `at`
  // lies in, read through a scratch buffer.
  struct Piece {
    int64_t file, offset, nbytes, tensor, at;
  };

  // Pieces that are read together.
  struct Request {
    size_t begin, end;
    int64_t nbytes;
  };

  void add(int64_t file, const at::Tensor& target, const RegionCopy& copy);
  void plan();
  void make_requests();
  void make_tasks();
  bool read(const Request& request, RangedReader::Worker& worker, const Memory& memory) const;
  bool read_streamed(const Request& request, RangedReader::Worker& worker, const Memory& memory) const;

  int64_t file_count_;
  std::vector<Piece> pieces_;
  std::vector<Region> scattered_;
  std::vector<Request> requests_;
  std::vector<size_t> tasks_; // where the requests end that a thread takes at once
};

} // namespace epload
