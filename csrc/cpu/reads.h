// Reads regions of files straight into tensors on CPU: the region copy with files in place of the bucket.
#pragma once

#include "regions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace epload {

constexpr int64_t kGapBytes = 4096; // a gap that is cheaper to read than to skip

struct ReadOutcome {
  int64_t nbytes = 0; // that were read, gaps included
  int64_t file = -1;  // index of the file that could not be read; -1 for none
  int64_t offset = 0; // where, in bytes
  int64_t error = 0;  // errno; 0 when the file ended there
};

// Throws ValueError, naming `op`, if a number can be no descriptor. -1 stands for a file that no row needs.
void check_descriptors(const char* op, c10::IntArrayRef descriptors);

// Reads all that the vectors have room for, from byte `offset` of one of some open files; changes the vectors. False
// when it could not be read: `outcome` then says where and why.
bool read_fully(
    c10::IntArrayRef descriptors, int64_t file, int64_t offset, iovec* vectors, size_t count, ReadOutcome& outcome);

// What is contiguous in the file and in the tensor goes there in one request with its neighbors, what is not through a
// small buffer of each thread; so do short requests on x86, as it is faster than the kernel's own copy.
class Reads {
 public:
  // Copy i reads from file `files[i]` of so many, with its bucket_offset counted from the start of the file. Of the
  // targets only their layouts are looked at.
  Reads(c10::IntArrayRef files, int64_t file_count, at::TensorList targets, const std::vector<RegionCopy>& copies);

  // From open files.
  ReadOutcome run(c10::IntArrayRef descriptors, const Memory& memory, int64_t threads) const;

 private:
  // Bytes of one file that are wanted: in one run at byte `at` of a tensor's data, or, if `tensor` is negative, through
  // a scratch buffer, for region `at` of those that are scattered.
  struct Want {
    int64_t file, offset, nbytes, tensor, at;
  };

  // Wants that are read together.
  struct Request {
    size_t begin, end;
    int64_t nbytes;
  };

  class Reader;

  void want(int64_t file, const at::Tensor& target, const RegionCopy& copy);
  void join();
  void deal();

  int64_t file_count_;
  std::vector<Want> wants_;
  std::vector<Region> scattered_;
  std::vector<Request> requests_;
  std::vector<size_t> bites_; // where each ends that a thread takes at once, as number of a request
  int64_t nbytes_ = 0;
};

} // namespace epload
