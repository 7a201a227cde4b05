#include "crossing.h"

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
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kSplitShare = 8;         // of a piece: a run is divided for as much room
constexpr int64_t kShortBytes = 256 << 10; // shorter runs into tensors on CPU are read together
constexpr int64_t kRowBytes = 512;         // shorter rows are not picked out of the file one by one
constexpr int64_t kRegionAlignment = 16;   // in a piece: of the widest access of a device
constexpr int64_t kRequestBytes = 4 << 20; // of rows that are read together, with what lies between them
constexpr int64_t kManyRows = 64;          // fewer take no time worth saving

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

// Calls visit(byte of the file) for each row, until one is false.
template <typename Visit>
bool for_rows(const int64_t* size, const int64_t* stride, size_t dims, int64_t from, const Visit& visit) {
  if (dims == 0) {
    return visit(from);
  }
  for (int64_t i = 0; i < size[0]; ++i, from += stride[0]) {
    if (!for_rows(size + 1, stride + 1, dims - 1, from, visit)) {
      return false;
    }
  }
  return true;
}

} // namespace

// Moves rows between memory and one end of the host; those that follow one another, or nearly, in one request.
class Requests {
 public:
  Requests(Move move, int64_t gap) : move_(std::move(move)), gap_(gap) {
  }

  bool add(int64_t file, int64_t offset, char* memory, int64_t nbytes) {
    const int64_t gap = offset - end_;
    const bool joins = count_ > 0 && file == file_ && gap >= 0 && gap <= gap_ && count_ + 2 <= kVectors &&
                       offset + nbytes - begin_ <= kRequestBytes;
    if (!joins && !flush()) {
      return false;
    }
    if (count_ == 0) {
      file_ = file;
      begin_ = offset;
    } else if (gap > 0) {
      skipped_.resize(gap_);
      vectors_[count_++] = {skipped_.data(), static_cast<size_t>(gap)};
    }
    vectors_[count_++] = {memory, static_cast<size_t>(nbytes)};
    end_ = offset + nbytes;
    return true;
  }

  bool flush() {
    return count_ == 0 || move_(file_, begin_, vectors_.data(), std::exchange(count_, 0));
  }

 private:
  const Move move_;
  const int64_t gap_;
  std::vector<char> skipped_;
  std::array<iovec, kVectors> vectors_{};
  size_t count_ = 0;
  int64_t file_ = 0, begin_ = 0, end_ = 0;
};

int64_t Crossing::Gathered::rows() const {
  return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
}

Crossing::Crossing(
    c10::IntArrayRef files,
    at::TensorList tensors,
    const std::vector<RegionCopy>& copies,
    Direction direction,
    int64_t piece_bytes,
    int64_t run_bytes,
    bool gathers_runs)
    : direction_(direction), piece_bytes_(piece_bytes), run_bytes_(run_bytes), gathers_runs_(gathers_runs) {
  for (size_t i = 0; i < copies.size(); ++i) {
    add(files[i], tensors[copies[i].tensor], copies[i]);
  }
  join_runs();
  make_loads();
}

void Crossing::add(int64_t file, const at::Tensor& tensor, const RegionCopy& copy) {
  if (span_of(copy) == 0) {
    return;
  }
  const auto item = static_cast<int64_t>(c10::elementSize(copy.dtype));
  if (copy.dtype == tensor.scalar_type()) {
    const auto strided = collapse(tensor, copy);
    if (strided.size.empty()) {
      runs_.push_back({file, copy.bucket_offset, strided.run * item, copy.tensor, strided.tensor});
      return;
    }
  }
  Gathered region{copy, file, copy.bucket_offset, item, {}, {}};
  int64_t nbytes = item; // in the piece
  for (const auto d : innermost_first(copy)) {
    const int64_t size = copy.size[d], stride = copy.bucket_stride[d] * item, gap = stride - region.row;
    // Of short rows what lies between them comes along; not when writing.
    const bool covers = direction_ == Direction::kUnpack && region.row < kRowBytes && gap >= 0 && gap <= kGapBytes;
    if (size > 1 && region.size.empty() && (gap == 0 || covers)) {
      nbytes = region.row += (size - 1) * stride;
    } else if (size > 1) {
      region.size.push_back(size);
      region.stride.push_back(stride);
      region.copy.bucket_stride[d] = nbytes / item;
      nbytes *= size;
    }
  }
  if (RegionCopy first, second; nbytes > piece_bytes_ && halve(copy, first, second)) {
    add(file, tensor, first);
    add(file, tensor, second);
    return;
  }
  std::reverse(region.size.begin(), region.size.end());
  std::reverse(region.stride.begin(), region.stride.end());
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
  std::vector<Run> joined;
  joined.reserve(runs_.size());
  for (auto& run : runs_) {
    if (!joined.empty()) {
      auto& last = joined.back();
      if (run.file == last.file && run.tensor == last.tensor && run.offset == last.offset + last.nbytes &&
          run.at == last.at + last.nbytes) {
        last.nbytes += run.nbytes;
        continue;
      }
    }
    joined.push_back(std::move(run));
  }
  runs_ = std::move(joined);
}

void Crossing::gather(const Run& part) {
  const RegionCopy copy{part.tensor, 0, at::kByte, {part.at}, {part.nbytes}, {1}};
  gathered_.push_back({copy, part.file, part.offset, part.nbytes, {}, {}, true});
}

// Long runs are cut. What is short is gathered, or stays together, so that requests can be joined.
void Crossing::make_loads() {
  std::vector<Run> parts;
  parts.reserve(runs_.size());
  const auto add_load = [&](const Run& part, bool joins) {
    const auto end = static_cast<int64_t>(parts.size()) + 1;
    if (joins && !loads_.empty() && loads_.back().nbytes + part.nbytes <= piece_bytes_) {
      loads_.back().end = end;
      loads_.back().nbytes += part.nbytes;
    } else {
      loads_.push_back({false, end - 1, end, part.nbytes});
    }
    parts.push_back(part);
  };
  bool joins = false;
  for (const auto& run : runs_) {
    if (!gathers_runs_ && run.nbytes < std::min(kShortBytes, piece_bytes_)) {
      add_load(run, std::exchange(joins, true));
      continue;
    }
    joins = false;
    // A part lies as far into a page of the piece as in the file (lead), and ends where a page ends: so that what is
    // read past the page cache comes straight into the piece.
    int64_t room = run_bytes_ - run.offset % kPieceAlignment;
    for (int64_t begin = 0; begin < run.nbytes; begin += std::exchange(room, run_bytes_)) {
      const Run part{run.file, run.offset + begin, std::min(room, run.nbytes - begin), run.tensor, run.at + begin};
      if (gathers_runs_ && part.nbytes < room) {
        gather(part);
      } else {
        add_load(part, false);
      }
    }
  }
  runs_ = std::move(parts);
  std::stable_sort(gathered_.begin(), gathered_.end(), [](const Gathered& a, const Gathered& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
  fill_pieces();
  arrange();
}

// Makes loads of what is gathered. A run is divided where a piece is full.
void Crossing::fill_pieces() {
  auto regions = std::exchange(gathered_, {});
  int64_t nbytes = piece_bytes_;
  const auto add = [&](Gathered& region) {
    const int64_t rows = region.row * region.rows();
    if (aligned(nbytes) + rows > piece_bytes_) {
      const auto begin = static_cast<int64_t>(gathered_.size());
      loads_.push_back({true, begin, begin, 0});
      nbytes = 0;
    }
    region.copy.bucket_offset = aligned(nbytes);
    nbytes = region.copy.bucket_offset + rows;
    TORCH_INTERNAL_ASSERT(nbytes <= piece_bytes_);
    gathered_.push_back(std::move(region));
    loads_.back().end++;
    loads_.back().nbytes = nbytes;
  };
  for (auto& region : regions) {
    while (region.is_run) {
      const int64_t left = piece_bytes_ - aligned(nbytes);
      const int64_t room = left < piece_bytes_ / kSplitShare ? piece_bytes_ : left;
      if (region.row <= room) {
        break;
      }
      auto first = region;
      first.row = first.copy.size[0] = room;
      add(first);
      region.offset += room;
      region.copy.start[0] += room;
      region.row = region.copy.size[0] -= room;
    }
    add(region);
  }
}

// In the order of the files, which the kernel reads ahead. What is written goes to all files in turn, as one thread
// alone can write to a file.
void Crossing::arrange() {
  std::stable_sort(loads_.begin(), loads_.end(), [&](const Load& a, const Load& b) { return place(a) < place(b); });
  if (direction_ == Direction::kUnpack) {
    return;
  }
  std::map<int64_t, int64_t> turns;
  for (auto& load : loads_) {
    load.turn = turns[place(load).first]++;
  }
  std::stable_sort(loads_.begin(), loads_.end(), [](const Load& a, const Load& b) { return a.turn < b.turn; });
}

std::pair<int64_t, int64_t> Crossing::place(const Load& load) const {
  return load.gathered ? std::pair(gathered_[load.begin].file, gathered_[load.begin].offset)
                       : std::pair(runs_[load.begin].file, runs_[load.begin].offset);
}

// One thread's work.
class Crossing::Worker {
 public:
  Worker(const Crossing& crossing, at::TensorList tensors, Move move, int64_t gap)
      : crossing_(crossing), tensors_(tensors), requests_(std::move(move), gap) {
  }

  // Between the host's end and tensors on CPU, whose data is at `data`.
  bool move_runs(const Load& load, const std::vector<char*>& data) {
    for (int64_t i = load.begin; i < load.end; ++i) {
      const auto& run = crossing_.runs_[i];
      if (!requests_.add(run.file, run.offset, data[run.tensor] + run.at, run.nbytes)) {
        return false;
      }
    }
    return requests_.flush();
  }

  // Between the host's end and memory of the load's bytes.
  bool move(const Load& load, char* memory) {
    if (!load.gathered) {
      const auto& run = crossing_.runs_[load.begin];
      return requests_.add(run.file, run.offset, memory, run.nbytes) && requests_.flush();
    }
    for (int64_t i = load.begin; i < load.end; ++i) {
      const auto& region = crossing_.gathered_[i];
      char* at = memory + region.copy.bucket_offset;
      const auto move_row = [&](int64_t from) {
        return requests_.add(region.file, from, std::exchange(at, at + region.row), region.row);
      };
      if (!for_rows(region.size.data(), region.stride.data(), region.size.size(), region.offset, move_row)) {
        return false;
      }
    }
    return requests_.flush();
  }

  // Between a piece (where the tensors are) and the tensors of gathered regions.
  void copy(const Load& load, const at::Tensor& piece) {
    std::vector<at::Tensor> tensors;
    std::vector<RegionCopy> copies;
    for (int64_t i = load.begin; i < load.end; ++i) {
      const auto& region = crossing_.gathered_[i];
      const auto& tensor = tensors_[region.copy.tensor];
      copies.push_back(region.copy);
      copies.back().tensor = i - load.begin;
      if (region.is_run) {
        tensors.push_back(bytes_of(tensor, region.copy.start[0], region.copy.size[0]));
        copies.back().start[0] = 0;
      } else {
        tensors.push_back(tensor);
      }
    }
    region_copy(piece, tensors, copies, crossing_.direction_);
  }

  // Host to device. False if the end has failed.
  bool send(const Load& load, DevicePipe::Lane& lane) {
    auto& piece = lane.next();
    if (!move(load, memory_of(load, piece))) {
      return false;
    }
    cross(load, lane, piece);
    return true;
  }

  // Device to host: what was asked for before is written while this load crosses.
  bool fetch(const Load& load, DevicePipe::Lane& lane) {
    auto& piece = lane.next();
    cross(load, lane, piece);
    return finish(&load, &piece);
  }

  bool finish(const Load* load = nullptr, DevicePipe::Piece* piece = nullptr) {
    const auto behind = std::exchange(behind_, {load, piece});
    if (behind.first == nullptr) {
      return true;
    }
    behind.second->done.synchronize();
    return move(*behind.first, memory_of(*behind.first, *behind.second));
  }

 private:
  // Where a load begins in its piece: a run as far into a page as in the file.
  int64_t lead(const Load& load) const {
    return load.gathered ? 0 : crossing_.runs_[load.begin].offset % kPieceAlignment;
  }

  char* memory_of(const Load& load, const DevicePipe::Piece& piece) const {
    return static_cast<char*>(piece.host.data_ptr()) + lead(load);
  }

  // Between the piece and the device. Even what has failed may have queued something.
  void cross(const Load& load, DevicePipe::Lane& lane, DevicePipe::Piece& piece) {
    try {
      queue(load, lane, piece);
    } catch (...) {
      piece.done.record(lane.stream);
      throw;
    }
    piece.done.record(lane.stream);
  }

  void queue(const Load& load, DevicePipe::Lane& lane, DevicePipe::Piece& piece) {
    const auto host = piece.host.narrow(0, lead(load), load.nbytes);
    const bool sends = crossing_.direction_ == Direction::kUnpack;
    const auto transfer = [&](const at::Tensor& device) {
      sends ? device.copy_(host, /*non_blocking=*/true) : host.copy_(device, /*non_blocking=*/true);
    };
    if (!load.gathered) {
      const auto& run = crossing_.runs_[load.begin];
      transfer(bytes_of(tensors_[run.tensor], run.at, run.nbytes));
      return;
    }
    const auto device = piece.device.narrow(0, 0, load.nbytes);
    if (sends) {
      transfer(device);
      copy(load, device);
    } else {
      copy(load, device);
      transfer(device);
    }
  }

  const Crossing& crossing_;
  at::TensorList tensors_;
  Requests requests_;
  std::pair<const Load*, DevicePipe::Piece*> behind_{};
};

// Runs `work` on threads that take the loads in turn. False if one of them returned false, which ends all.
bool Crossing::share(int64_t threads, const std::function<bool(const Next& next)>& work) const {
  std::atomic<bool> valid{true};
  Tasks tasks(loads_.size());
  on_threads(threads, tasks, [&] {
    // Of no concern to autograd: the op itself says what it has written.
    const at::AutoDispatchBelowADInplaceOrView plain;
    const auto next = [&]() -> const Load* {
      const size_t task = tasks.take();
      return task < loads_.size() ? &loads_[task] : nullptr;
    };
    if (!work(next)) {
      valid = false;
      tasks.stop();
    }
  });
  return valid;
}

bool Crossing::run(
    DevicePipe& pipe, int64_t threads, at::TensorList tensors, const MakeEnd& make_end, int64_t gap) const {
  DevicePipe::Use use(pipe);
  std::atomic<size_t> next_lane{0};
  const bool valid = share(std::min(threads, pipe.threads()), [&](const Next& next) {
    auto& lane = use.lane(next_lane++);
    const c10::StreamGuard on_stream(lane.stream);
    Worker worker(*this, tensors, make_end(), gap);
    const bool sends = direction_ == Direction::kUnpack;
    while (const Load* load = next()) {
      if (!(sends ? worker.send(*load, lane) : worker.fetch(*load, lane))) {
        return false;
      }
    }
    return worker.finish();
  });
  use.finish();
  return valid;
}

bool Crossing::run(int64_t threads, at::TensorList tensors, const MakeEnd& make_end, int64_t gap) const {
  std::vector<char*> data;
  for (const auto& tensor : tensors) {
    data.push_back(tensor.numel() > 0 ? static_cast<char*>(tensor.data_ptr()) : nullptr);
  }
  return share(threads, [&](const Next& next) {
    Worker worker(*this, tensors, make_end(), gap);
    at::Tensor piece;
    while (const Load* load = next()) {
      if (!load->gathered) {
        if (!worker.move_runs(*load, data)) {
          return false;
        }
        continue;
      }
      if (!piece.defined()) {
        piece = at::empty({piece_bytes_}, at::TensorOptions().dtype(at::kByte));
      }
      if (!worker.move(*load, static_cast<char*>(piece.data_ptr()))) {
        return false;
      }
      worker.copy(*load, piece.narrow(0, 0, load->nbytes));
    }
    return true;
  });
}

std::vector<std::array<int64_t, 3>> Crossing::short_rows(size_t count, int64_t most) const {
  std::vector<std::array<int64_t, 3>> found;
  int64_t rows = 0;
  const auto add = [&](int64_t file, int64_t offset, int64_t nbytes) {
    if (found.size() < count) {
      found.push_back({file, offset, nbytes});
    }
    return found.size() < count;
  };
  for (const auto& run : runs_) {
    if (run.nbytes <= most) {
      ++rows;
      add(run.file, run.offset, run.nbytes);
    }
  }
  for (const auto& region : gathered_) {
    if (region.row <= most) {
      rows += region.rows();
      for_rows(region.size.data(), region.stride.data(), region.size.size(), region.offset, [&](int64_t from) {
        return add(region.file, from, region.row);
      });
    }
  }
  return rows < kManyRows ? std::vector<std::array<int64_t, 3>>() : found;
}

} // namespace epload
