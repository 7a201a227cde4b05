#include "digest.h"

#include "cpu/threads.h"
#include "dtypes.h"
#include "region_copy.h"
#include "strided.h"
#include "tensor_memory.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace epload {
namespace {

constexpr int64_t kDigestBytesPerThread = 1 << 20;
__extension__ using Product = unsigned __int128;

// Four lanes, which are independent chains, take the 8-byte words of the stream in turn. A step adds up both halves of
// a product without carry, since its lower half alone passes a change of the highest bits on as it is, so that changes
// of a few signs could undo each other. Accidents are detected with probability 1 - 2^-64 or so; bytes can be chosen so
// that they are not. The same on all machines (little-endian ones, as are all that torch runs on). Never 0.
uint64_t checksum_of(const void* data, size_t nbytes) {
  constexpr size_t kLanes = 4, kBlock = 8 * kLanes;
  using Words = std::array<uint64_t, kLanes>;
  const auto step = [](uint64_t lane, uint64_t word) {
    const auto product = Product{lane ^ word} * 0x9e3779b97f4a7c15u;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  Words lanes{1, 2, 3, 4};
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t left = nbytes; left > 0;) {
    Words words{}; // the length tells the zeros behind the end from data
    const size_t taken = std::min(left, kBlock);
    if (taken == kBlock) {
      std::memcpy(words.data(), bytes, kBlock); // of constant size: loads
    } else {
      std::memcpy(words.data(), bytes, taken);
    }
    for (size_t i = 0; i < kLanes; ++i) {
      lanes[i] = step(lanes[i], words[i]);
    }
    bytes += taken;
    left -= taken;
  }
  uint64_t sum = nbytes;
  for (const auto lane : lanes) {
    sum = step(sum, lane);
  }
  return sum == 0 ? 1 : sum;
}

// The checksum of the elements in row-major order. Of what was converted, all NaN are made equal: which one a
// conversion gives depends on how many elements it does at once.
int64_t digest_of(at::Tensor region, bool converted) {
  if (converted && region.is_floating_point() && region.element_size() > 1) {
    region = region.clone(at::MemoryFormat::Contiguous);
    region.masked_fill_(region.isnan(), std::numeric_limits<double>::quiet_NaN());
  }
  region = region.contiguous();
  return static_cast<int64_t>(checksum_of(region.const_data_ptr(), region.nbytes()));
}

// Digests of all rows, int64, by several threads. `digest` takes the index of a row.
template <typename Digest>
at::Tensor digest_rows(const std::vector<RegionCopy>& rows, const Digest& digest) {
  auto digests = at::empty({static_cast<int64_t>(rows.size())}, at::kLong);
  auto* const numbers = digests.mutable_data_ptr<int64_t>();
  int64_t nbytes = 0;
  for (const auto& row : rows) {
    nbytes += std::min(span_of(row), kDigestBytesPerThread);
  }
  Tasks tasks(rows.size());
  on_threads(std::clamp<int64_t>(nbytes / kDigestBytesPerThread, 1, at::get_num_threads()), tasks, [&] {
    for (size_t row = 0; (row = tasks.take()) < rows.size();) {
      numbers[row] = digest(row);
    }
  });
  return digests;
}

int64_t checksum(const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(bytes.is_cpu(), "checksum: expected a tensor on cpu, got ", bytes.device());
  check_memory("checksum", bytes, 0);
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "checksum: expected a contiguous tensor, got strides ", bytes.strides());
  return static_cast<int64_t>(checksum_of(bytes.const_data_ptr(), bytes.nbytes()));
}

} // namespace

at::Tensor digest_tensors(at::TensorList tensors, const at::Tensor& copies) {
  check_device("digest_tensors", tensors, at::kCPU);
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), tensors, copies);
  return digest_rows(rows, [&](size_t i) {
    const auto& row = rows[i];
    auto region = tensors[row.tensor].detach();
    for (size_t d = 0; d < row.size.size(); ++d) {
      region = region.narrow(static_cast<int64_t>(d), row.start[d], row.size[d]);
    }
    return digest_of(region, row.dtype != region.scalar_type());
  });
}

at::Tensor digest_bucket(const at::Tensor& bucket, const at::Tensor& copies) {
  TORCH_CHECK_VALUE(bucket.is_cpu(), "digest_bucket: expected the bucket on cpu, got one on ", bucket.device());
  check_bucket(bucket);
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(bucket.numel(), copies);
  for (const auto& row : rows) {
    TORCH_CHECK_VALUE(
        find_dtype(row.tensor) != nullptr, "digest_bucket: expected a dtype code in column 0, got ", row.tensor);
  }
  return digest_rows(rows, [&](size_t i) {
    auto row = rows[i];
    const auto dtype = static_cast<at::ScalarType>(row.tensor);
    const auto region = at::empty(row.size, at::TensorOptions().dtype(dtype));
    row.start.assign(row.size.size(), 0);
    copy_one_aten(bucket, region, row, Direction::kUnpack);
    return digest_of(region, row.dtype != dtype);
  });
}

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("checksum", TORCH_FN(epload::checksum));
  m.impl("digest_tensors", TORCH_FN(epload::digest_tensors));
  m.impl("digest_bucket", TORCH_FN(epload::digest_bucket));
}
