// The ops that move regions of tensors between a device, or CPU, and files, or memory, of the host.
#include "crossing.h"

#include "../strided.h"
#include "../tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <vector>

namespace epload {
namespace {

using Pipe = c10::intrusive_ptr<DevicePipe>;

constexpr int64_t kPieceBytes = 1 << 20; // of a thread that reads for tensors on CPU
constexpr int64_t kRunBytes = 4 << 20;
constexpr int64_t kWriters = 2; // threads to a file: the kernel has one write at a time, while the other's next arrives

// How it is found out that a store takes long for a request whatever its size, as a network file system does.
constexpr size_t kProbes = 8;             // short reads, whose median is what one takes
constexpr int64_t kProbeBytes = 64 << 10; // that a short one has at most
constexpr double kSlowSeconds = 5e-4;     // from which on it is slow: a cold SSD takes less
constexpr double kSlowRate = 256e6;       // bytes/s at which a slow store surely reads on
constexpr int64_t kMostGap = 4 << 20;

// Bytes that take no longer to read than another request: short reads are made and timed. What they have read is read
// again, which is little, and fails again if it has.
int64_t measure_gap(const Crossing& crossing, const Move& move) {
  const auto rows = crossing.short_rows(kProbes, kProbeBytes);
  if (rows.size() < kProbes) {
    return kGapBytes;
  }
  std::vector<char> scratch(kProbeBytes);
  std::array<double, kProbes> seconds{};
  for (size_t i = 0; i < kProbes; ++i) {
    const auto& [file, offset, nbytes] = rows[i];
    iovec whole{scratch.data(), static_cast<size_t>(nbytes)};
    const auto began = std::chrono::steady_clock::now();
    if (!move(file, offset, &whole, 1)) {
      return kGapBytes;
    }
    seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  std::nth_element(seconds.begin(), seconds.begin() + kProbes / 2, seconds.end());
  const double median = seconds[kProbes / 2];
  return median < kSlowSeconds ? kGapBytes : std::clamp(static_cast<int64_t>(median * kSlowRate), kGapBytes, kMostGap);
}

// The rows of a copy table, with their offsets in the files, and the file of each.
struct Rows {
  std::vector<int64_t> files;
  std::vector<RegionCopy> copies;

  // `files_of` and `offsets_of` say of each tensor of the checkpoint in which of `file_count` files and at which byte
  // it starts, `origins` of each row of `table` to which of these tensors it belongs and at which byte of it the row
  // starts. Throws ValueError, naming `op`, if they do not fit together, or unless `tensors` are on `device`.
  Rows(
      const char* op,
      const at::Tensor& files_of,
      const at::Tensor& offsets_of,
      const at::Tensor& origins,
      at::TensorList tensors,
      const at::Tensor& table,
      size_t file_count,
      c10::Device device) {
    check_device(op, tensors, device);
    const auto* const file_of = numbers_of(op, "files", files_of, 1);
    const auto* const offset_of = numbers_of(op, "offsets", offsets_of, 1);
    const auto* origin = numbers_of(op, "origins", origins, 2);
    const int64_t count = files_of.numel();
    TORCH_CHECK_VALUE(
        origins.size(1) == 2 && table.dim() == 2 && origins.size(0) == table.size(0) && count == offsets_of.numel(),
        op,
        ": expected origins of shape [n, 2] for n rows, and as many files as offsets, got origins of shape ",
        origins.sizes(),
        " for rows of shape ",
        table.sizes(),
        ", ",
        count,
        " files and ",
        offsets_of.numel(),
        " offsets");
    std::vector<int64_t> offsets;
    for (int64_t row = 0; row < origins.size(0); ++row, origin += 2) {
      const auto tensor = origin[0];
      int64_t offset = -1;
      TORCH_CHECK_VALUE(
          tensor >= 0 && tensor < count && !__builtin_add_overflow(offset_of[tensor], origin[1], &offset),
          op,
          ": row ",
          row,
          " starts at byte ",
          origin[1],
          " of tensor ",
          tensor,
          " of ",
          count);
      const auto file = file_of[tensor];
      TORCH_CHECK_VALUE(
          file >= 0 && file < static_cast<int64_t>(file_count),
          op,
          ": row ",
          row,
          " names file ",
          file,
          " of ",
          file_count);
      files.push_back(file);
      offsets.push_back(offset);
    }
    copies = decode_copies(std::numeric_limits<int64_t>::max(), tensors, table, offsets);
  }
};

Outcome read_regions(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    int64_t threads,
    bool direct,
    const std::optional<Pipe>& pipe) {
  const at::NoGradGuard no_grad;
  const auto device = pipe.has_value() ? (*pipe)->device() : c10::Device(at::kCPU);
  const Rows rows("read_regions", files, offsets, origins, targets, copies, descriptors.size(), device);
  const int64_t piece_bytes = pipe.has_value() ? (*pipe)->piece_bytes() : kPieceBytes;
  const int64_t run_bytes = pipe.has_value() ? piece_bytes : kRunBytes;
  const Crossing crossing(
      rows.files, targets, rows.copies, Direction::kUnpack, piece_bytes, run_bytes, pipe.has_value());
  OpenFiles probed("read_regions", descriptors), open("read_regions", descriptors, direct);
  const auto gap = measure_gap(crossing, probed.reader());
  const auto make_end = [&] { return open.reader(); };
  mark_written(targets);
  pipe.has_value() ? crossing.run(**pipe, (*pipe)->threads(), targets, make_end, gap)
                   : crossing.run(threads, targets, make_end, gap);
  return open.outcome();
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
  const auto bytes = pipe->piece_bytes();
  const Rows rows("write_from_device", files, offsets, origins, sources, copies, descriptors.size(), pipe->device());
  const Crossing crossing(rows.files, sources, rows.copies, Direction::kPack, bytes, bytes);
  OpenFiles open("write_from_device", descriptors);
  const auto file_count = static_cast<int64_t>(std::set<int64_t>(rows.files.begin(), rows.files.end()).size());
  crossing.run(*pipe, kWriters * file_count, sources, [&] { return open.writer(); }, 0);
  return open.outcome();
}

// Both ways between tensors of the host, as if they were files, and of the device.
void transfer(
    const char* op,
    at::TensorList hosts,
    const at::Tensor& origins,
    at::TensorList devices,
    const at::Tensor& copies,
    DevicePipe& pipe,
    Direction direction) {
  const at::NoGradGuard no_grad;
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
  const Rows rows(
      op,
      at::arange(count, numbers),
      at::zeros({count}, numbers),
      origins,
      devices,
      copies,
      hosts.size(),
      pipe.device());
  for (size_t i = 0; i < rows.copies.size(); ++i) {
    const auto nbytes = static_cast<int64_t>(hosts[rows.files[i]].nbytes());
    const auto& copy = rows.copies[i];
    TORCH_CHECK_VALUE(
        copy.bucket_offset >= 0 && copy.bucket_offset <= nbytes && span_of(copy) <= nbytes - copy.bucket_offset,
        op,
        ": row ",
        i,
        " reaches outside tensor ",
        rows.files[i],
        " of ",
        nbytes,
        " bytes on cpu");
  }
  const bool reads = direction == Direction::kUnpack;
  const auto move = [&data, reads](int64_t file, int64_t offset, iovec* vectors, size_t vector_count) {
    for (char* at = data[file] + offset; vector_count > 0; --vector_count, ++vectors) {
      std::memcpy(reads ? vectors->iov_base : at, reads ? at : vectors->iov_base, vectors->iov_len);
      at += vectors->iov_len;
    }
    return true;
  };
  const Crossing crossing(rows.files, devices, rows.copies, direction, pipe.piece_bytes(), pipe.piece_bytes());
  mark_written(reads ? devices : hosts);
  crossing.run(pipe, pipe.threads(), devices, [&] { return Move(move); }, 0);
}

void upload(
    at::TensorList sources,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    const Pipe& pipe) {
  transfer("upload", sources, origins, targets, copies, *pipe, Direction::kUnpack);
}

void download(
    at::TensorList sources,
    const at::Tensor& copies,
    at::TensorList targets,
    const at::Tensor& origins,
    const Pipe& pipe) {
  transfer("download", targets, origins, sources, copies, *pipe, Direction::kPack);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_device_pipe_class();
  m.impl("read_regions", TORCH_FN(epload::read_regions));
  m.impl("write_from_device", TORCH_FN(epload::write_from_device));
  m.impl("upload", TORCH_FN(epload::upload));
  m.impl("download", TORCH_FN(epload::download));
}
