#include "crossing.h"

#include "../cpu/ranged_reader.h"
#include "../cpu/threads.h"
#include "../strided.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kStraightBytes = 256 << 10; // a shorter run costs less as a part of a piece than as a copy of its own
constexpr int64_t kRowBytes = 512;            // shorter rows are not picked out of the file one by one
constexpr int64_t kRegionAlignment = 16;      // in a piece: of the widest access of a device
constexpr int64_t kManyRows = 64;             // fewer take no time worth saving

int64_t aligned(int64_t at) {
  return (at + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// Some bytes of a tensor's memory, which are whole elements of it.
at::Tensor bytes_of(const at::Tensor& tensor, int64_t at, int64_t nbytes) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  const int64_t first = at / item, last = (at + nbytes + item - 1) / item;
  const auto elements = at::as_strided(tensor, {last - first}, {1}, tensor.storage_offset() + first);
  return elements.view(at::kByte).narrow(0, at - first * item, nbytes);
}

// Calls visit(byte of the file, byte in the piece) for each row.
template <typename Visit>
bool for_rows(
    const int64_t* size,
    const int64_t* stride,
    size_t dims,
    int64_t row,
    int64_t from,
    int64_t& at,
    const Visit& visit) {
  if (dims == 0) {
    const bool fine = visit(from, at);
    at += row;
    return fine;
  }
  for (int64_t i = 0; i < size[0]; ++i, from += stride[0]) {
    if (!for_rows(size + 1, stride + 1, dims - 1, row, from, at, visit)) {
      return false;
    }
  }
  return true;
}

} // namespace

Crossing::Crossing(
    c10::IntArrayRef files,
    at::TensorList tensors,
    const std::vector<RegionCopy>& copies,
    Direction direction,
    int64_t piece_bytes)
    : direction_(direction), piece_bytes_(piece_bytes) {
  for (size_t i = 0; i < copies.size(); ++i) {
    add(files[i], tensors[copies[i].tensor], copies[i]);
  }
  join_runs();
  make_loads();
}

void Crossing::add(int64_t file, const at::Tensor& tensor, const RegionCopy& copy) {
  const int64_t span = span_of(copy);
  if (span == 0) {
    return;
  }
  const auto item = static_cast<int64_t>(c10::elementSize(copy.dtype));
  if (copy.dtype == tensor.scalar_type()) {
    const auto strided = collapse(tensor, copy);
    if (strided.size.empty()) {
      runs_.push_back({file, copy.bucket_offset, strided.run * item, copy.tensor, strided.tensor, copy});
      return;
    }
  }
  Gathered region{copy, file, copy.bucket_offset, item, {}, {}};
  int64_t rows = 1;
  for (size_t d = copy.size.size(); d-- > 0;) {
    const int64_t stride = copy.bucket_stride[d] * item;
    if (copy.size[d] == 1) {
      continue;
    }
    if (region.size.empty() && stride == region.row) {
      region.row *= copy.size[d];
    } else {
      region.size.push_back(copy.size[d]);
      region.stride.push_back(stride);
      rows *= copy.size[d];
    }
  }
  // Of short rows all that lies between the first and the last comes along; not when writing.
  const bool whole = rows > 1 && region.row < kRowBytes && direction_ == Direction::kUnpack;
  const int64_t nbytes = whole ? span : region.row * rows;
  if (RegionCopy first, second; nbytes > piece_bytes_ && halve(copy, first, second)) {
    add(file, tensor, first);
    add(file, tensor, second);
    return;
  }
  if (whole) {
    region.row = span;
    region.size.clear();
    region.stride.clear();
  } else {
    std::reverse(region.size.begin(), region.size.end());
    std::reverse(region.stride.begin(), region.stride.end());
    int64_t inner = 1;
    for (size_t d = copy.size.size(); d-- > 0;) {
      region.copy.bucket_stride[d] = inner;
      inner *= copy.size[d];
    }
  }
  gathered_.push_back(std::move(region));
}

// Joins runs that follow one another on both sides.
void Crossing::join_runs() {
  const auto before = [](const Run& a, const Run& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  };
  if (!std::is_sorted(runs_.begin(), runs_.end(), before)) {
    std::stable_sort(runs_.begin(), runs_.end(), before);
  }
  size_t count = 0;
  for (auto& run : runs_) {
    if (count > 0) {
      auto& last = runs_[count - 1];
      if (run.file == last.file && run.tensor == last.tensor && run.offset == last.offset + last.nbytes &&
          run.at == last.at + last.nbytes) {
        last.nbytes += run.nbytes;
        last.joined = true;
        continue;
      }
    }
    if (runs_.data() + count != &run) {
      runs_[count] = std::move(run);
    }
    ++count;
  }
  runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(count), runs_.end());
}

// Long runs are cut, short ones are gathered.
void Crossing::make_loads() {
  for (size_t i = 0; i < runs_.size(); ++i) {
    const auto& run = runs_[i];
    if (run.nbytes < std::min(kStraightBytes, piece_bytes_)) {
      Gathered region{run.copy, run.file, run.offset, run.nbytes, {}, {}};
      if (run.joined) {
        region.copy = {run.tensor, 0, at::kByte, {run.at}, {run.nbytes}, {1}};
        region.as_bytes = true;
      }
      gathered_.push_back(std::move(region));
      continue;
    }
    // A run lies as far into a page of the piece as in the file (lead), and is cut where pages begin: so that what is
    // read past the page cache comes straight into the piece.
    int64_t room = piece_bytes_ - run.offset % kPieceAlignment;
    for (int64_t begin = 0; begin < run.nbytes; room = piece_bytes_) {
      const int64_t nbytes = std::min(room, run.nbytes - begin);
      loads_.push_back({static_cast<int64_t>(i), begin, begin + nbytes, nbytes});
      begin += nbytes;
    }
  }
  std::stable_sort(gathered_.begin(), gathered_.end(), [](const Gathered& a, const Gathered& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
  int64_t nbytes = 0;
  for (size_t i = 0; i < gathered_.size(); ++i) {
    auto& region = gathered_[i];
    int64_t rows = region.row;
    for (const auto size : region.size) {
      rows *= size;
    }
    const bool follows = i > 0 && !loads_.empty() && loads_.back().run < 0 && aligned(nbytes) + rows <= piece_bytes_;
    if (!follows) {
      loads_.push_back({-1, static_cast<int64_t>(i), static_cast<int64_t>(i), 0});
      nbytes = 0;
    }
    region.copy.bucket_offset = aligned(nbytes);
    nbytes = region.copy.bucket_offset + rows;
    TORCH_INTERNAL_ASSERT(nbytes <= piece_bytes_);
    loads_.back().end = static_cast<int64_t>(i) + 1;
    loads_.back().nbytes = nbytes;
  }
  // In the order of the files, which the kernel reads ahead.
  std::stable_sort(loads_.begin(), loads_.end(), [&](const Load& a, const Load& b) { return place(a) < place(b); });
}

std::pair<int64_t, int64_t> Crossing::place(const Load& load) const {
  if (load.run >= 0) {
    return {runs_[load.run].file, runs_[load.run].offset + load.begin};
  }
  return {gathered_[load.begin].file, gathered_[load.begin].offset};
}

// One thread's work.
class Crossing::Worker {
 public:
  Worker(const Crossing& crossing, at::TensorList tensors, DevicePipe::Lane& lane, HostEnd& end, int64_t gap)
      : crossing_(crossing), tensors_(tensors), lane_(lane), end_(end), gap_(gap) {
  }

  // Host to device. False if the end has failed.
  bool send(const Load& load) {
    auto& piece = lane_.next();
    if (!move(load, piece.host)) {
      return false;
    }
    cross(load, piece);
    return true;
  }

  // Device to host: what was asked for before is written while this load crosses.
  bool fetch(const Load& load) {
    auto& piece = lane_.next();
    cross(load, piece);
    const auto before = std::exchange(behind_, {&load, &piece});
    return write(before);
  }

  bool finish() {
    return write(std::exchange(behind_, {}));
  }

 private:
  using Behind = std::pair<const Load*, DevicePipe::Piece*>;

  bool write(const Behind& behind) {
    if (behind.first == nullptr) {
      return true;
    }
    behind.second->done.synchronize();
    return move(*behind.first, behind.second->host);
  }

  // Where a load begins in its piece: a run as far into a page as in the file.
  int64_t lead(const Load& load) const {
    return load.run >= 0 ? crossing_.place(load).second % kPieceAlignment : 0;
  }

  // Between the piece and the device. Even what has failed may have queued something.
  void cross(const Load& load, DevicePipe::Piece& piece) {
    try {
      queue(load, piece);
    } catch (...) {
      piece.done.record(lane_.stream);
      throw;
    }
    piece.done.record(lane_.stream);
  }

  void queue(const Load& load, DevicePipe::Piece& piece) {
    const auto host = piece.host.narrow(0, lead(load), load.nbytes);
    const bool sends = crossing_.direction_ == Direction::kUnpack;
    const auto copy = [&](const at::Tensor& device) {
      sends ? device.copy_(host, /*non_blocking=*/true) : host.copy_(device, /*non_blocking=*/true);
    };
    if (load.run >= 0) {
      const auto& run = crossing_.runs_[load.run];
      copy(bytes_of(tensors_[run.tensor], run.at + load.begin, load.nbytes));
    } else {
      const auto device = piece.on_device(lane_.stream.device()).narrow(0, 0, load.nbytes);
      std::vector<at::Tensor> tensors;
      std::vector<RegionCopy> copies;
      for (int64_t i = load.begin; i < load.end; ++i) {
        const auto& region = crossing_.gathered_[i];
        copies.push_back(region.copy);
        copies.back().tensor = i - load.begin;
        if (region.as_bytes) {
          tensors.push_back(bytes_of(tensors_[region.copy.tensor], region.copy.start[0], region.copy.size[0]));
          copies.back().start[0] = 0;
        } else {
          tensors.push_back(tensors_[region.copy.tensor]);
        }
      }
      if (sends) {
        copy(device);
        region_copy(device, tensors, copies, Direction::kUnpack);
      } else {
        region_copy(device, tensors, copies, Direction::kPack);
        copy(device);
      }
    }
  }

  // Between the host's end and the piece.
  bool move(const Load& load, const at::Tensor& host) {
    char* const piece = static_cast<char*>(host.data_ptr());
    if (load.run >= 0) {
      const auto& run = crossing_.runs_[load.run];
      iovec whole{piece + lead(load), static_cast<size_t>(load.nbytes)};
      return end_.move(run.file, run.offset + load.begin, &whole, 1);
    }
    for (int64_t i = load.begin; i < load.end; ++i) {
      const auto& region = crossing_.gathered_[i];
      int64_t at = region.copy.bucket_offset;
      const bool fine = for_rows(
          region.size.data(),
          region.stride.data(),
          region.size.size(),
          region.row,
          region.offset,
          at,
          [&](int64_t from, int64_t to) {
            return add(region.file, from, {piece + to, static_cast<size_t>(region.row)});
          });
      if (!fine) {
        return false;
      }
    }
    return flush();
  }

  // Collects vectors that follow one another.
  bool add(int64_t file, int64_t offset, iovec vector) {
    const int64_t gap = offset - end_of_last_;
    if (count_ > 0 && (file != file_ || gap < 0 || gap > gap_ || count_ + 2 > kVectors) && !flush()) {
      return false;
    }
    if (count_ == 0) {
      file_ = file;
      first_ = offset;
    } else if (gap > 0) {
      vectors_[count_++] = {trash(), static_cast<size_t>(gap)};
    }
    vectors_[count_++] = vector;
    end_of_last_ = offset + static_cast<int64_t>(vector.iov_len);
    return true;
  }

  bool flush() {
    return count_ == 0 || end_.move(file_, first_, vectors_.data(), std::exchange(count_, 0));
  }

  void* trash() {
    if (!trash_.defined()) {
      trash_ = at::empty({gap_}, at::TensorOptions().dtype(at::kByte));
    }
    return trash_.data_ptr();
  }

  const Crossing& crossing_;
  at::TensorList tensors_;
  DevicePipe::Lane& lane_;
  HostEnd& end_;
  const int64_t gap_;
  at::Tensor trash_;
  Behind behind_{};
  std::array<iovec, kVectors> vectors_{};
  size_t count_ = 0;
  int64_t file_ = 0, first_ = 0, end_of_last_ = 0;
};

bool Crossing::run(
    DevicePipe& pipe,
    at::TensorList tensors,
    const std::function<std::unique_ptr<HostEnd>()>& make_end,
    int64_t gap) const {
  DevicePipe::Use use(pipe);
  std::atomic<size_t> next_lane{0};
  std::atomic<bool> fine{true};
  Tasks tasks(loads_.size());
  on_threads(pipe.threads(), tasks, [&] {
    auto& lane = use.lane(next_lane++);
    const c10::StreamGuard on_stream(lane.stream);
    const at::AutoDispatchBelowADInplaceOrView
        plain; // of no concern to autograd: the op itself says what it has written
    const auto end = make_end();
    Worker worker(*this, tensors, lane, *end, gap);
    const bool sends = direction_ == Direction::kUnpack;
    bool mine = true;
    for (size_t task = 0; mine && (task = tasks.take()) < loads_.size();) {
      mine = sends ? worker.send(loads_[task]) : worker.fetch(loads_[task]);
    }
    if (!mine || !worker.finish()) {
      fine = false;
      tasks.stop();
    }
  });
  use.finish();
  return fine;
}

std::vector<std::array<int64_t, 3>> Crossing::short_rows(size_t count, int64_t most) const {
  std::vector<std::array<int64_t, 3>> found;
  int64_t rows = 0;
  for (const auto& region : gathered_) {
    if (region.row > most) {
      continue;
    }
    rows += std::accumulate(region.size.begin(), region.size.end(), int64_t{1}, std::multiplies<>());
    int64_t at = 0;
    for_rows(
        region.size.data(),
        region.stride.data(),
        region.size.size(),
        region.row,
        region.offset,
        at,
        [&](int64_t from, int64_t) {
          if (found.size() < count) {
            found.push_back({region.file, from, region.row});
          }
          return found.size() < count;
        });
  }
  return rows < kManyRows ? std::vector<std::array<int64_t, 3>>() : found;
}

} // namespace epload
