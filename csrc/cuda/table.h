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
  uint32_t chunks() const {
    return static_cast<uint32_t>(chunks_.size());
  }
  int64_t nbytes() const {
    return static_cast<int64_t>((chunks_.size() + dims_.size()) * sizeof(Record));
  }
  // Writes nbytes() bytes: the chunks, then the dims.
  void write(char* to) const;

 private:
  // Units of `width` bytes that follow one another on both sides.
  void add_run(const char* source, char* target, int64_t units, int64_t width);
  // `rows` runs of `run` elements, in units of `unit`, as `size` and the strides say.
  void add_box(
      const Side& from, const Side& to, int64_t run, int64_t unit, int64_t rows, const int64_t* size, int64_t dims);

  std::vector<Chunk> chunks_;
  std::vector<Dim> dims_;
  bool converts_ = false;
};

} // namespace epload::cuda
