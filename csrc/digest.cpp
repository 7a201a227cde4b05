#include "digest.h"

#include "checksum.h"
#include "cpu/threads.h"
#include "region_copy.h"
#include "strided.h"
#include "tensor_memory.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace epload {
namespace {

constexpr int64_t kGatheredBytes = 256 << 10; // of strided elements, which are copied before they are digested
constexpr int64_t kDigestBytesPerThread = 1 << 20;

// The elements in row-major order.
void update(Checksum& sum, const at::Tensor& region) {
  if (region.is_contiguous() || static_cast<int64_t>(region.nbytes()) <= kGatheredBytes) {
    const auto contiguous = region.contiguous();
    sum.update(contiguous.const_data_ptr(), contiguous.nbytes());
    return;
  }
  const int64_t rows = region.size(0);
  const int64_t step = std::max<int64_t>(1, kGatheredBytes / (static_cast<int64_t>(region.nbytes()) / rows));
  for (int64_t row = 0; row < rows; row += step) {
    update(sum, step == 1 ? region.select(0, row) : region.narrow(0, row, std::min(step, rows - row)));
  }
}

template <typename Number>
void make_equal(Number* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] != numbers[i]) {
      numbers[i] = std::numeric_limits<Number>::quiet_NaN();
    }
  }
}

// All NaN of a contiguous tensor that was converted: which one a conversion gives depends on how many elements it does
// at once.
void make_nan_equal(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return make_equal(tensor.mutable_data_ptr<at::BFloat16>(), tensor.numel());
    case at::kHalf:
      return make_equal(tensor.mutable_data_ptr<at::Half>(), tensor.numel());
    case at::kFloat:
      return make_equal(tensor.mutable_data_ptr<float>(), tensor.numel());
    case at::kDouble:
      return make_equal(tensor.mutable_data_ptr<double>(), tensor.numel());
    default:
      return;
  }
}

uint64_t digest_in_tensor(const at::Tensor& tensor, const RegionCopy& copy) {
  auto region = tensor.detach();
  for (size_t d = 0; d < copy.size.size(); ++d) {
    region = region.narrow(static_cast<int64_t>(d), copy.start[d], copy.size[d]);
  }
  Checksum sum;
  if (copy.dtype != tensor.scalar_type()) {
    region = region.clone(at::MemoryFormat::Contiguous);
    make_nan_equal(region);
  }
  update(sum, region);
  return sum.value();
}

// What the region becomes in a tensor of `dtype`. `tensor` and `start` of the copy do not matter.
uint64_t digest_in_bucket(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype) {
  Checksum sum;
  if (copy.dtype != dtype) {
    const auto converted = at::empty(copy.size, at::TensorOptions().dtype(dtype));
    RegionCopy whole = copy;
    whole.start.assign(copy.size.size(), 0);
    copy_one_aten(bucket, converted, whole, Direction::kUnpack);
    make_nan_equal(converted);
    update(sum, converted);
  } else if (span_of(copy) > 0) { // as bytes, since elements need not be aligned
    const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
    auto size = copy.size, stride = copy.bucket_stride;
    std::transform(stride.begin(), stride.end(), stride.begin(), [&](int64_t step) { return step * itemsize; });
    size.push_back(itemsize);
    stride.push_back(1);
    update(sum, at::as_strided(bucket, size, stride, bucket.storage_offset() + copy.bucket_offset));
  }
  return sum.value();
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
      numbers[row] = static_cast<int64_t>(digest(row));
    }
  });
  return digests;
}

int64_t checksum(const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(bytes.is_cpu(), "checksum: expected a tensor on cpu, got ", bytes.device());
  check_memory("checksum", bytes, 0);
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "checksum: expected a contiguous tensor, got strides ", bytes.strides());
  Checksum sum;
  sum.update(bytes.const_data_ptr(), bytes.nbytes());
  return static_cast<int64_t>(sum.value());
}

} // namespace

at::Tensor digest_tensors(at::TensorList tensors, const at::Tensor& copies) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].is_cpu(), "digest_tensors: expected tensors on cpu, tensor ", i, " is on ", tensors[i].device());
  }
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), tensors, copies);
  return digest_rows(rows, [&](size_t i) { return digest_in_tensor(tensors[rows[i].tensor], rows[i]); });
}

at::Tensor digest_bucket(const at::Tensor& bucket, const at::Tensor& copies) {
  TORCH_CHECK_VALUE(bucket.is_cpu(), "digest_bucket: expected the bucket on cpu, got one on ", bucket.device());
  check_bucket(bucket);
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(bucket.numel(), copies);
  std::vector<at::ScalarType> dtypes;
  for (const auto& row : rows) {
    TORCH_CHECK_VALUE(
        row.tensor >= 0 && row.tensor < static_cast<int64_t>(at::ScalarType::Undefined),
        "digest_bucket: expected a dtype code in column 0, got ",
        row.tensor);
    dtypes.push_back(static_cast<at::ScalarType>(row.tensor));
  }
  return digest_rows(rows, [&](size_t i) { return digest_in_bucket(bucket, rows[i], dtypes[i]); });
}

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("checksum", TORCH_FN(epload::checksum));
  m.impl("digest_tensors", TORCH_FN(epload::digest_tensors));
  m.impl("digest_bucket", TORCH_FN(epload::digest_bucket));
}
