// Regions of tensors that are read from files or written to them, or that cross between memory of the host and a
// device: the region copy with files, or other memory of the host, in place of the bucket.
#pragma once

#include "../cpu/files.h"
#include "../region_copy.h"
#include "pipe.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace epload {

constexpr int64_t kGapBytes = 4096; // a gap that is cheaper to read than to skip

// What crosses, worked out from where the regions lie.
//
// Of a run that is contiguous on both sides, as much as fills pieces crosses straight to its tensor. Everything else is
// gathered in a piece, row by row, and the regions are copied out of that, or out of a piece on the device that it goes
// to: so little more than what is needed crosses, in few copies, each of about a piece: a device begins every copy with
// a pause of some microseconds. Only of short rows what lies between them comes along.
class Crossing {
 public:
  // Region i lies in file `files[i]`, with its bucket_offset counted from the start of the file. Only the layouts of
  // the tensors are used. Runs are cut into parts of `run_bytes`, other regions into pieces of `piece_bytes`.
  // `gathers_runs`: short runs are gathered too.
  Crossing(
      c10::IntArrayRef files,
      at::TensorList tensors,
      const std::vector<RegionCopy>& copies,
      Direction direction,
      int64_t piece_bytes,
      int64_t run_bytes,
      bool gathers_runs = true);

  using MakeEnd = std::function<Move()>;

  // Moves everything between the host and a device, by up to `threads` of the pipe's threads. Each has a host's end of
  // its own, from `make_end`, whose reads may be joined over gaps of up to `gap` bytes. Returns when all that is the
  // host's has been read or written; what crosses to the device may still be on its way, before whatever the current
  // stream gets next. False if an end has failed.
  bool run(DevicePipe& pipe, int64_t threads, at::TensorList tensors, const MakeEnd& make_end, int64_t gap) const;

  // The same into tensors on CPU.
  bool run(int64_t threads, at::TensorList tensors, const MakeEnd& make_end, int64_t gap) const;

  // Up to `count` places of the host's with at most `most` bytes each, if there are many such: {file, offset, bytes}.
  std::vector<std::array<int64_t, 3>> short_rows(size_t count, int64_t most) const;

 private:
  // Bytes that are contiguous on both sides.
  struct Run {
    int64_t file, offset, nbytes;
    int64_t tensor, at; // of its first byte, in the tensor's data
  };

  // A region that is gathered: where it lies in the piece, and as rows of `row` bytes in the file and in the piece.
  struct Gathered {
    RegionCopy copy;
    int64_t file, offset, row;
    Dims size, stride;   // of what repeats the row, outermost first; strides in the file, in bytes
    bool is_run = false; // one row; the copy is of the tensor's data as bytes

    int64_t rows() const;
  };

  // What takes a piece: gathered regions [begin, end), or one run, or for tensors on CPU also short runs [begin, end).
  struct Load {
    bool gathered;
    int64_t begin, end;
    int64_t nbytes;   // in the piece
    int64_t turn = 0; // of those of its file, where files take turns
  };

  class Worker;
  using Next = std::function<const Load*()>; // null when none is left

  void add(int64_t file, const at::Tensor& tensor, const RegionCopy& copy);
  void join_runs();
  void gather(const Run& part);
  void make_loads();
  void fill_pieces();
  void arrange();
  std::pair<int64_t, int64_t> place(const Load& load) const; // the file and byte at which it begins
  bool share(int64_t threads, const std::function<bool(const Next& next)>& work) const;

  Direction direction_;
  int64_t piece_bytes_, run_bytes_;
  bool gathers_runs_;
  std::vector<Run> runs_;
  std::vector<Gathered> gathered_;
  std::vector<Load> loads_;
};

} // namespace epload
