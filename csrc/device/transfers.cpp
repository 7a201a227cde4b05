// The ops that move regions of tensors between a device and files, or memory, of the host.
#include "crossing.h"

#include "../cpu/ranged_reader.h"
#include "../strided.h"
#include "../tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace epload {
namespace {

using Pipe = c10::intrusive_ptr<DevicePipe>;
using Outcome = std::tuple<int64_t, int64_t, int64_t, int64_t>;

constexpr int64_t kMostGap = 4 << 20;

// What the threads of one op have moved, and what the first that failed met.
struct Shared {
  std::mutex mutex;
  ReadOutcome outcome;
};

// Open files that are read.
class FileSource final : public HostEnd {
 public:
  FileSource(const RangedReader& reader, Shared& shared) : worker_(reader), shared_(shared) {
  }
  ~FileSource() override {
    const std::lock_guard<std::mutex> hold(shared_.mutex);
    shared_.outcome.nbytes += worker_.nbytes();
    if (worker_.failure().file >= 0 && shared_.outcome.file < 0) {
      const auto nbytes = shared_.outcome.nbytes;
      shared_.outcome = worker_.failure();
      shared_.outcome.nbytes = nbytes;
    }
  }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  FileSource(FileSource&&) = delete;
  FileSource& operator=(FileSource&&) = delete;

  bool move(int64_t file, int64_t offset, iovec* vectors, size_t count) override {
    return worker_.read(file, offset, vectors, count);
  }

 private:
  RangedReader::Worker worker_;
  Shared& shared_;
};

// Open files that are written.
class FileSink final : public HostEnd {
 public:
  FileSink(c10::IntArrayRef descriptors, Shared& shared) : descriptors_(descriptors), shared_(shared) {
  }

  bool move(int64_t file, int64_t offset, iovec* vectors, size_t count) override {
    int64_t total = 0;
    while (count > 0) {
      const ssize_t written = pwritev(static_cast<int>(descriptors_[file]), vectors, static_cast<int>(count), offset);
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        const std::lock_guard<std::mutex> hold(shared_.mutex);
        if (shared_.outcome.file < 0) {
          shared_.outcome = {shared_.outcome.nbytes, file, offset, written < 0 ? errno : EIO};
        }
        return false;
      }
      offset += written;
      total += written;
      auto left = static_cast<size_t>(written);
      while (count > 0 && left >= vectors->iov_len) {
        left -= vectors->iov_len;
        ++vectors;
        --count;
      }
      if (count > 0) {
        vectors->iov_base = static_cast<char*>(vectors->iov_base) + left;
        vectors->iov_len -= left;
      }
    }
    const std::lock_guard<std::mutex> hold(shared_.mutex);
    shared_.outcome.nbytes += total;
    return true;
  }

 private:
  c10::IntArrayRef descriptors_;
  Shared& shared_;
};

// Tensors on CPU as if they were files.
class MemoryEnd final : public HostEnd {
 public:
  MemoryEnd(const std::vector<char*>& data, bool reads) : data_(data), reads_(reads) {
  }

  bool move(int64_t file, int64_t offset, iovec* vectors, size_t count) override {
    for (char* at = data_[file] + offset; count > 0; --count, ++vectors) {
      reads_ ? std::memcpy(vectors->iov_base, at, vectors->iov_len)
             : std::memcpy(at, vectors->iov_base, vectors->iov_len);
      at += vectors->iov_len;
    }
    return true;
  }

 private:
  const std::vector<char*>& data_;
  bool reads_;
};

// Bytes that take no longer to read than another request: short reads are made and timed. False if one failed.
bool measure_gap(const Crossing& crossing, HostEnd& end, int64_t& gap) {
  gap = kGapBytes;
  const auto rows = crossing.short_rows(kProbes, kProbeBytes);
  if (rows.size() < kProbes) {
    return true;
  }
  std::vector<char> scratch(kProbeBytes);
  std::array<double, kProbes> taken{};
  for (size_t i = 0; i < kProbes; ++i) {
    const auto& [file, offset, nbytes] = rows[i];
    iovec whole{scratch.data(), static_cast<size_t>(nbytes)};
    const auto began = std::chrono::steady_clock::now();
    if (!end.move(file, offset, &whole, 1)) {
      return false;
    }
    taken[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  std::nth_element(taken.begin(), taken.begin() + kProbes / 2, taken.end());
  if (const double median = taken[kProbes / 2]; median >= kSlowSeconds) {
    gap = std::clamp(static_cast<int64_t>(median * kSlowRate), gap, kMostGap);
  }
  return true;
}

void check_device(const char* op, at::TensorList tensors, const DevicePipe& pipe) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].device() == pipe.device(),
        op,
        ": expected tensors on ",
        pipe.device(),
        ", tensor ",
        i,
        " is on ",
        tensors[i].device());
  }
}

void check_files(const char* op, c10::IntArrayRef files, size_t count) {
  for (size_t i = 0; i < files.size(); ++i) {
    TORCH_CHECK_VALUE(
        files[i] >= 0 && files[i] < static_cast<int64_t>(count),
        op,
        ": row ",
        i,
        " names file ",
        files[i],
        " of ",
        count);
  }
}

Outcome read_to_device(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    const Pipe& pipe,
    bool direct) {
  const at::NoGradGuard no_grad;
  const FileOrigins from("read_to_device", files, offsets, origins, copies);
  check_device("read_to_device", targets, *pipe);
  check_files("read_to_device", from.files, descriptors.size());
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), targets, copies, from.offsets);
  const Crossing crossing(from.files, targets, rows, Direction::kUnpack, pipe->piece_bytes());
  const RangedReader reader("read_to_device", descriptors, 0, direct);
  Shared shared;
  const auto make_end = [&]() -> std::unique_ptr<HostEnd> { return std::make_unique<FileSource>(reader, shared); };
  int64_t gap = 0;
  if (measure_gap(crossing, *make_end(), gap)) { // of what has been read some is read again, which is little
    crossing.run(*pipe, targets, make_end, gap);
  }
  mark_written(targets);
  return shared.outcome.as_tuple();
}

Outcome write_from_device(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    at::TensorList sources,
    const at::Tensor& copies,
    const Pipe& pipe) {
  const at::NoGradGuard no_grad;
  for (const auto descriptor : descriptors) {
    TORCH_CHECK_VALUE(
        descriptor >= -1 && descriptor <= std::numeric_limits<int>::max(),
        "write_from_device: expected descriptors of open files, or -1, got ",
        descriptor);
  }
  const FileOrigins to("write_from_device", files, offsets, origins, copies);
  check_device("write_from_device", sources, *pipe);
  check_files("write_from_device", to.files, descriptors.size());
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), sources, copies, to.offsets);
  const Crossing crossing(to.files, sources, rows, Direction::kPack, pipe->piece_bytes());
  Shared shared;
  crossing.run(*pipe, sources, [&] { return std::make_unique<FileSink>(descriptors, shared); }, 0);
  return shared.outcome.as_tuple();
}

// Both ways between tensors of the host and of the device.
void transfer(
    const char* op,
    at::TensorList hosts,
    const at::Tensor& origins,
    at::TensorList devices,
    const at::Tensor& copies,
    DevicePipe& pipe,
    Direction direction) {
  const auto count = static_cast<int64_t>(hosts.size());
  std::vector<char*> data;
  for (size_t i = 0; i < hosts.size(); ++i) {
    check_memory(op, hosts[i], i);
    TORCH_CHECK_VALUE(
        hosts[i].is_cpu() && hosts[i].is_contiguous(),
        op,
        ": expected contiguous tensors on cpu, tensor ",
        i,
        " is not");
    data.push_back(static_cast<char*>(hosts[i].data_ptr()));
  }
  const auto numbers = at::TensorOptions().dtype(at::kLong);
  const FileOrigins from(op, at::arange(count, numbers), at::zeros({count}, numbers), origins, copies);
  check_device(op, devices, pipe);
  check_files(op, from.files, hosts.size());
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), devices, copies, from.offsets);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto nbytes = static_cast<int64_t>(hosts[from.files[i]].nbytes());
    TORCH_CHECK_VALUE(
        rows[i].bucket_offset >= 0 && rows[i].bucket_offset <= nbytes &&
            span_of(rows[i]) <= nbytes - rows[i].bucket_offset,
        op,
        ": row ",
        i,
        " reaches outside tensor ",
        from.files[i],
        " of ",
        nbytes,
        " bytes on cpu");
  }
  const Crossing crossing(from.files, devices, rows, direction, pipe.piece_bytes());
  const bool reads = direction == Direction::kUnpack;
  crossing.run(pipe, devices, [&] { return std::make_unique<MemoryEnd>(data, reads); }, 0);
  mark_written(reads ? devices : hosts);
}

void upload(
    at::TensorList sources,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    const Pipe& pipe) {
  const at::NoGradGuard no_grad;
  transfer("upload", sources, origins, targets, copies, *pipe, Direction::kUnpack);
}

void download(
    at::TensorList sources,
    const at::Tensor& copies,
    at::TensorList targets,
    const at::Tensor& origins,
    const Pipe& pipe) {
  const at::NoGradGuard no_grad;
  transfer("download", targets, origins, sources, copies, *pipe, Direction::kPack);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_device_pipe_class();
  m.impl("read_to_device", TORCH_FN(epload::read_to_device));
  m.impl("write_from_device", TORCH_FN(epload::write_from_device));
  m.impl("upload", TORCH_FN(epload::upload));
  m.impl("download", TORCH_FN(epload::download));
}
