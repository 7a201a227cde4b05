// Reads regions of files straight into tensors on CPU: the region copy with files in place of the bucket.
#pragma once

#include "ranged_reader.h"
#include "regions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace epload {

// What is read from some files, worked out once. A region that is contiguous in the file and in its tensor
// is read there directly, in one request with its neighbors; others go through a small buffer of each thread. So do
// short requests on x86, as that is faster than the kernel's own copy.
//
// On a store where a request takes long whatever its size, as on a network file system, what lies between pieces is
// read along with them. A few short requests at the start of a run show whether it is one.
class Reads {
 public:
  // Copy i reads from file `files[i]` of `file_count`, with its bucket_offset counted from the start of the file. Only
  // the layouts of the targets are used.
  Reads(c10::IntArrayRef files, int64_t file_count, at::TensorList targets, const std::vector<RegionCopy>& copies);

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
    int64_t nbytes;       // from the first byte to the last
    bool covered = false; // read into the scratch buffer with all that lies between them
  };

  struct Requests {
    std::vector<Request> requests;
    std::vector<size_t> tasks; // where the requests end that a thread takes at once
  };

  // What a few short requests, read one by one, have shown.
  struct Probe {
    bool fine = true;             // false when the file could not be read
    std::vector<size_t> requests; // that were read, ascending
    int64_t gap = 0;              // bytes that take no longer to read than another request; 0 if requests are cheap
  };

  void add(int64_t file, const at::Tensor& target, const RegionCopy& copy);
  void make_requests();
  Requests cover(int64_t gap) const;
  Probe probe(RangedReader::Worker& worker, const Memory& memory) const;
  bool read(const Request& request, RangedReader::Worker& worker, const Memory& memory) const;
  bool read_covered(const Request& request, RangedReader::Worker& worker, const Memory& memory) const;
  bool read_streamed(const Request& request, RangedReader::Worker& worker, const Memory& memory) const;

  int64_t file_count_;
  std::vector<Piece> pieces_;
  std::vector<Region> scattered_;
  Requests planned_;
};

} // namespace epload
