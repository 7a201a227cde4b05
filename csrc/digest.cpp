#include "digest.h"

#include "checksum.h"
#include "tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace epload {
namespace {

void add(Checksum& sum, const char* at, const MemoryBox& box, size_t dim) {
  if (dim == box.size.size()) {
    sum.update(at, box.run);
    return;
  }
  for (int64_t i = 0; i < box.size[dim]; ++i) {
    add(sum, at + i * box.stride[dim], box, dim + 1);
  }
}

// `stride` returns the bytes between two indices of a dim.
template <typename Stride>
MemoryBox box_of(int64_t begin, const Dims& size, int64_t itemsize, const Stride& stride) {
  MemoryBox box{begin, itemsize, {}, {}};
  for (size_t d = size.size(); d-- > 0;) {
    if (size[d] == 0) {
      return {};
    }
    if (size[d] == 1) { // its stride need not fit those of the others
      continue;
    }
    if (box.size.empty() && stride(d) == box.run) {
      box.run *= size[d];
      continue;
    }
    box.size.push_back(size[d]);
    box.stride.push_back(stride(d));
  }
  std::reverse(box.size.begin(), box.size.end());
  std::reverse(box.stride.begin(), box.stride.end());
  return box;
}

template <typename Number>
void make_equal(Number* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] != numbers[i]) {
      numbers[i] = std::numeric_limits<Number>::quiet_NaN();
    }
  }
}

// All NaN of a contiguous tensor, of the dtypes for which conversions differ.
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

uint64_t checksum_of(const at::Tensor& contiguous) {
  Checksum sum;
  sum.update(contiguous.const_data_ptr(), contiguous.nbytes());
  return sum.value();
}

} // namespace

MemoryBox box_in_tensor(const at::Tensor& tensor, const RegionCopy& copy) {
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  const auto strides = tensor.strides();
  int64_t begin = 0;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    begin += copy.start[d] * strides[d] * itemsize;
  }
  return box_of(begin, copy.size, itemsize, [&](size_t d) { return strides[d] * itemsize; });
}

MemoryBox box_in_bucket(const RegionCopy& copy) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(copy.dtype));
  return box_of(copy.bucket_offset, copy.size, itemsize, [&](size_t d) { return copy.bucket_stride[d] * itemsize; });
}

uint64_t digest(const char* data, const MemoryBox& box) {
  Checksum sum;
  if (box.run > 0) {
    add(sum, data + box.begin, box, 0);
  }
  return sum.value();
}

std::vector<uint64_t> digest_tensors(at::TensorList tensors, const std::vector<RegionCopy>& copies) {
  std::vector<uint64_t> digests;
  digests.reserve(copies.size());
  for (const auto& copy : copies) {
    const auto& tensor = tensors[copy.tensor];
    digests.push_back(
        converts(copy, tensor.scalar_type())
            ? digest_converted(tensor, copy)
            : digest(static_cast<const char*>(tensor.const_data_ptr()), box_in_tensor(tensor, copy)));
  }
  return digests;
}

uint64_t digest_converted(const at::Tensor& tensor, const RegionCopy& copy) {
  auto region = tensor.detach();
  for (size_t d = 0; d < copy.size.size(); ++d) {
    region = region.narrow(static_cast<int64_t>(d), copy.start[d], copy.size[d]);
  }
  const auto made = region.clone(at::MemoryFormat::Contiguous);
  make_nan_equal(made);
  return checksum_of(made);
}

at::Tensor converted(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype) {
  auto made = at::empty(copy.size, at::TensorOptions().dtype(dtype));
  RegionCopy whole = copy;
  whole.start.assign(copy.size.size(), 0);
  copy_one_aten(bucket, made, whole, Direction::kUnpack);
  make_nan_equal(made);
  return made;
}

uint64_t digest_unpacked(const at::Tensor& bucket, const RegionCopy& copy, at::ScalarType dtype) {
  if (converts(copy, dtype)) {
    return checksum_of(converted(bucket, copy, dtype));
  }
  return digest(static_cast<const char*>(bucket.const_data_ptr()), box_in_bucket(copy));
}

at::Tensor as_tensor(const std::vector<uint64_t>& digests) {
  auto result = at::empty({static_cast<int64_t>(digests.size())}, at::kLong);
  std::copy(digests.begin(), digests.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

namespace {

int64_t checksum(const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(bytes.is_cpu(), "checksum: expected a tensor on cpu, got ", bytes.device());
  check_memory("checksum", bytes, 0);
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "checksum: expected a contiguous tensor, got strides ", bytes.strides());
  return static_cast<int64_t>(checksum_of(bytes));
}

at::Tensor digest_tensors_op(at::TensorList tensors, const at::Tensor& copies) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].is_cpu(), "digest_tensors: expected tensors on cpu, tensor ", i, " is on ", tensors[i].device());
  }
  return as_tensor(digest_tensors(tensors, decode_copies(std::numeric_limits<int64_t>::max(), tensors, copies)));
}

at::Tensor digest_bucket(const at::Tensor& bucket, const at::Tensor& copies) {
  TORCH_CHECK_VALUE(
      bucket.is_cpu() && bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous(),
      "digest_bucket: expected the bucket as a contiguous 1-D uint8 tensor on cpu, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes(),
      " on ",
      bucket.device());
  check_memory("digest_bucket", bucket, 0);
  const at::NoGradGuard no_grad;
  const auto rows = decode_copies(bucket.numel(), copies);
  const auto dtypes = target_dtypes("digest_bucket", rows);
  std::vector<uint64_t> digests;
  for (size_t i = 0; i < rows.size(); ++i) {
    digests.push_back(digest_unpacked(bucket, rows[i], dtypes[i]));
  }
  return as_tensor(digests);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("checksum", TORCH_FN(epload::checksum));
  m.impl("digest_tensors", TORCH_FN(epload::digest_tensors_op));
  m.impl("digest_bucket", TORCH_FN(epload::digest_bucket));
}
