#include "reads.h"

#include "../tensor_memory.h"
#include "stream_copy.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <tuple>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kRequestBytes = 16 << 20;
constexpr int64_t kScratchBytes = 4 << 20;
constexpr int64_t kStreamBytes = 256 << 10; // requests up to this are read into the cache and streamed from there: the
                                            // kernel copies slowly to memory that is in no cache
constexpr int64_t kSparse = 4;              // a span with less than one useful byte in 4 is read in parts,
constexpr int64_t kSparseBytes = 64 << 10;  // if it is longer than this
constexpr size_t kTaskRequests = 32;        // a thread takes this many requests at once,
constexpr int64_t kTaskBytes = 1 << 20;     // or fewer that have this many bytes
constexpr size_t kManyRequests = 64;        // fewer take no time worth saving

// Divides requests among tasks.
template <typename Request>
std::vector<size_t> tasks_of(const std::vector<Request>& requests) {
  std::vector<size_t> tasks;
  size_t begin = 0;
  int64_t nbytes = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    nbytes += requests[i].nbytes;
    if (i + 1 - begin == kTaskRequests || nbytes >= kTaskBytes || i + 1 == requests.size()) {
      tasks.push_back(i + 1);
      begin = i + 1;
      nbytes = 0;
    }
  }
  return tasks;
}

} // namespace

// Adds the pieces of a region, which is halved along its outermost dims while its span is too large or mostly gaps.
void Reads::add(int64_t file, const at::Tensor& target, const RegionCopy& copy) {
  const auto item = static_cast<int64_t>(c10::elementSize(copy.dtype));
  int64_t elements = 1;
  for (const auto size : copy.size) {
    elements *= size;
  }
  if (elements == 0) {
    return;
  }
  const int64_t span = span_of(copy);
  if (copy.dtype == target.scalar_type()) {
    const auto strided = collapse(target, copy);
    if (strided.size.empty()) {
      for (int64_t at = 0; at < span; at += kRequestBytes) { // so that threads share a long one
        const int64_t nbytes = std::min(span - at, kRequestBytes);
        pieces_.push_back({file, copy.bucket_offset + at, nbytes, copy.tensor, strided.tensor + at});
      }
      return;
    }
  }
  if (span > kScratchBytes || (span > kSparseBytes && elements * item * kSparse < span)) {
    if (RegionCopy first, second; halve(copy, first, second)) {
      add(file, target, first);
      add(file, target, second);
      return;
    }
  }
  pieces_.push_back({file, copy.bucket_offset, span, -1, static_cast<int64_t>(scattered_.size())});
  scattered_.emplace_back(target, copy);
}

Reads::Reads(c10::IntArrayRef files, int64_t file_count, at::TensorList targets, const std::vector<RegionCopy>& copies)
    : file_count_(file_count) {
  TORCH_CHECK_VALUE(
      files.size() == copies.size(),
      "read_regions: expected a file for each of ",
      copies.size(),
      " rows, got ",
      files.size());
  pieces_.reserve(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    TORCH_CHECK_VALUE(
        files[i] >= 0 && files[i] < file_count, "read_regions: row ", i, " names file ", files[i], " of ", file_count);
    add(files[i], targets[copies[i].tensor], copies[i]);
  }
  const auto before = [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  };
  if (!std::is_sorted(pieces_.begin(), pieces_.end(), before)) { // mostly they are, and sorting moves all of them
    std::stable_sort(pieces_.begin(), pieces_.end(), before);
  }
  make_requests();
  planned_.tasks = tasks_of(planned_.requests);
}

// Joins pieces that follow one another.
void Reads::make_requests() {
  auto& requests = planned_.requests;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = pieces_[i];
    if (!requests.empty()) {
      auto& last = requests.back();
      const auto& before = pieces_[i - 1];
      const int64_t gap = piece.offset - before.offset - before.nbytes;
      if (piece.tensor >= 0 && before.tensor >= 0 && piece.file == before.file && gap >= 0 && gap <= kGapBytes &&
          last.nbytes + gap + piece.nbytes <= kRequestBytes && 2 * (last.end - last.begin) + 2 <= kVectors) {
        last.end = i + 1;
        last.nbytes += gap + piece.nbytes;
        continue;
      }
    }
    requests.push_back({i, i + 1, piece.nbytes});
  }
}

// The planned requests, joined where up to `gap` bytes lie between two.
Reads::Requests Reads::cover(int64_t gap) const {
  std::vector<Request> requests;
  for (const auto& request : planned_.requests) {
    const auto& first = pieces_[request.begin];
    if (!requests.empty()) {
      auto& last = requests.back();
      const auto& before = pieces_[last.begin];
      const int64_t nbytes = std::max(last.nbytes, first.offset - before.offset + request.nbytes);
      if (first.file == before.file && first.offset - before.offset - last.nbytes <= gap && nbytes <= kScratchBytes) {
        last = {last.begin, request.end, nbytes, true};
        continue;
      }
    }
    requests.push_back(request);
  }
  auto tasks = tasks_of(requests);
  return {std::move(requests), std::move(tasks)};
}

// Reads a few short requests to find out how long one takes.
Reads::Probe Reads::probe(RangedReader::Worker& worker, const Memory& memory) const {
  Probe probe;
  const auto& requests = planned_.requests;
  if (requests.size() < kManyRequests) {
    return probe;
  }
  const StreamFence fence;
  std::array<double, kProbes> taken{};
  for (size_t i = 0; i < requests.size() && probe.requests.size() < kProbes; ++i) {
    if (requests[i].nbytes > kProbeBytes) {
      continue;
    }
    const auto began = std::chrono::steady_clock::now();
    if (!read(requests[i], worker, memory)) {
      probe.fine = false;
      return probe;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    taken[probe.requests.size()] = seconds.count();
    probe.requests.push_back(i);
  }
  if (probe.requests.size() == kProbes) {
    std::nth_element(taken.begin(), taken.begin() + kProbes / 2, taken.end());
    const double median = taken[kProbes / 2];
    if (median >= kSlowSeconds) {
      probe.gap = std::min(static_cast<int64_t>(median * kSlowRate), kScratchBytes);
    }
  }
  return probe;
}

// False when the file could not be read.
bool Reads::read(const Request& request, RangedReader::Worker& worker, const Memory& memory) const {
  const auto& first = pieces_[request.begin];
  if (request.covered || first.tensor < 0) {
    return read_covered(request, worker, memory);
  }
  if (kStreams && request.nbytes <= kStreamBytes) {
    return read_streamed(request, worker, memory);
  }
  std::array<iovec, kVectors> vectors;
  size_t count = 0;
  int64_t at = first.offset;
  for (size_t i = request.begin; i < request.end; ++i) {
    const auto& piece = pieces_[i];
    if (piece.offset > at) {
      vectors[count++] = {worker.scratch(kGapBytes).data_ptr(), static_cast<size_t>(piece.offset - at)};
    }
    vectors[count++] = {memory.data[piece.tensor] + piece.at, static_cast<size_t>(piece.nbytes)};
    at = piece.offset + piece.nbytes;
  }
  return worker.read(first.file, first.offset, vectors.data(), count);
}

bool Reads::read_covered(const Request& request, RangedReader::Worker& worker, const Memory& memory) const {
  const auto& first = pieces_[request.begin];
  const auto buffer = worker.scratch(request.nbytes).narrow(0, 0, request.nbytes);
  iovec whole{buffer.data_ptr(), static_cast<size_t>(request.nbytes)};
  // Other ranks may take other parts of the same bytes, and then find them in the page cache.
  if (!worker.read_cached(first.file, first.offset, &whole, 1)) {
    return false;
  }
  const auto* const bytes = static_cast<const char*>(buffer.data_ptr());
  for (size_t i = request.begin; i < request.end; ++i) {
    const auto& piece = pieces_[i];
    if (piece.tensor < 0) {
      scattered_[piece.at].copy(buffer, first.offset, memory, Direction::kUnpack, false);
    } else {
      stream_copy(memory.data[piece.tensor] + piece.at, bytes + (piece.offset - first.offset), piece.nbytes);
    }
  }
  return true;
}

bool Reads::read_streamed(const Request& request, RangedReader::Worker& worker, const Memory& memory) const {
  const auto& first = pieces_[request.begin];
  const char* const bytes = worker.load(first.file, first.offset, first.offset + request.nbytes);
  if (bytes == nullptr) {
    return false;
  }
  for (size_t i = request.begin; i < request.end; ++i) {
    const auto& piece = pieces_[i];
    stream_copy(memory.data[piece.tensor] + piece.at, bytes + (piece.offset - first.offset), piece.nbytes);
  }
  return true;
}

ReadOutcome Reads::run(c10::IntArrayRef descriptors, const Memory& memory, int64_t threads, bool direct) const {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(descriptors.size()) == file_count_,
      "reading files: expected ",
      file_count_,
      " descriptors, got ",
      descriptors.size());
  const RangedReader reader("reading files", descriptors, kScratchBytes, direct);
  RangedReader::Worker prober(reader);
  const auto probed = probe(prober, memory);
  if (!probed.fine) {
    return prober.failure();
  }
  const bool slow = probed.gap > 0;
  const auto covering = slow ? cover(probed.gap) : Requests(); // of what has been read, too, which is little
  const auto& chosen = slow ? covering : planned_;
  const auto is_read = [&](size_t i) {
    return !slow && std::binary_search(probed.requests.begin(), probed.requests.end(), i);
  };
  auto outcome = reader.run(chosen.tasks.size(), threads, [&](size_t task, RangedReader::Worker& worker) {
    for (size_t i = task == 0 ? 0 : chosen.tasks[task - 1]; i < chosen.tasks[task]; ++i) {
      if (!is_read(i) && !read(chosen.requests[i], worker, memory)) {
        return false;
      }
    }
    return true;
  });
  outcome.nbytes += prober.nbytes();
  return outcome;
}

namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t> read_regions(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    int64_t threads,
    bool direct) {
  const FileOrigins from("read_regions", files, offsets, origins, copies);
  for (size_t i = 0; i < targets.size(); ++i) {
    TORCH_CHECK_VALUE(
        targets[i].is_cpu(), "read_regions: expected targets on cpu, tensor ", i, " is on ", targets[i].device());
  }
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), targets, copies, from.offsets);
  const Reads reads(from.files, static_cast<int64_t>(descriptors.size()), targets, rows);
  const auto outcome = reads.run(descriptors, memory_of(targets, rows), threads, direct);
  mark_written(targets);
  return outcome.as_tuple();
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("read_regions", TORCH_FN(epload::read_regions));
}
