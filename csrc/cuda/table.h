// Builds the table that the kernel reads: plain numbers and pointers, no tensor and no CUDA.
#pragma once

#include "chunk.h"

#include <cstdint>
#include <vector>

namespace epload::cuda {

// One side of a region: where its first element is, how its outer dims step (bytes, outermost first), its format.
struct Side {
  char* data;
  const int64_t* stride;
  Number number; // kNone where nothing is converted
  int64_t itemsize;
};

class Table {
 public:
  // Adds a region of `run` contiguous elements repeated over `dims` outer dims of `size`. False if the kernel cannot do
  // it (more dims or elements than it counts, or a number to convert that is not aligned to its size); then nothing was
  // added.
  bool add(const Side& from, const Side& to, int64_t run, const int64_t* size, int64_t dims);

  bool empty() const {
    return chunks_.empty();
  }
  bool converts() const {
    return converts_;
  }
  uint32_t regions() const {
    return static_cast<uint32_t>(regions_.size());
  }
  uint32_t chunks() const {
    return static_cast<uint32_t>(chunks_.size());
  }
  int64_t nbytes() const {
    return static_cast<int64_t>(regions_.size() * sizeof(Region) + chunks_.size() * sizeof(Chunk));
  }
  // Writes nbytes() bytes: the regions, then the chunks.
  void write(char* to) const;

 private:
  std::vector<Region> regions_;
  std::vector<Chunk> chunks_;
  bool converts_ = false;
};

} // namespace epload::cuda
