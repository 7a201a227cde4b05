#include "digest.h"

#include "checksum.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace epload {
namespace {

// A box in memory: runs of `run` bytes, strides in bytes.
void add(Checksum& sum, const char* at, const int64_t* size, const int64_t* stride, size_t dims, int64_t run) {
  while (dims > 0 && stride[dims - 1] == run) {
    run *= size[--dims];
  }
  if (dims == 0) {
    sum.update(at, run);
    return;
  }
  if (dims == 1) {
    for (int64_t i = 0; i < size[0]; ++i) {
      sum.update(at + i * stride[0], run);
    }
    return;
  }
  for (int64_t i = 0; i < size[0]; ++i) {
    add(sum, at + i * stride[0], size + 1, stride + 1, dims - 1, run);
  }
}

uint64_t digest(const char* at, const Dims& size, const Dims& stride, int64_t itemsize) {
  Checksum sum;
  // Dims of one element need not fit into the strides of the others.
  Dims sizes, strides;
  for (size_t d = 0; d < size.size(); ++d) {
    if (size[d] == 0) {
      return sum.value();
    }
    if (size[d] != 1) {
      sizes.push_back(size[d]);
      strides.push_back(stride[d]);
    }
  }
  add(sum, at, sizes.data(), strides.data(), sizes.size(), itemsize);
  return sum.value();
}

} // namespace

std::vector<uint64_t> digest_tensors(at::TensorList tensors, const std::vector<RegionCopy>& copies) {
  std::vector<uint64_t> digests;
  digests.reserve(copies.size());
  for (const auto& copy : copies) {
    const auto& tensor = tensors[copy.tensor];
    const auto itemsize = static_cast<int64_t>(tensor.element_size());
    const char* at = static_cast<const char*>(tensor.const_data_ptr());
    Dims stride;
    for (size_t d = 0; d < copy.size.size(); ++d) {
      stride.push_back(tensor.stride(static_cast<int64_t>(d)) * itemsize);
      at += copy.start[d] * stride.back();
    }
    digests.push_back(digest(at, copy.size, stride, itemsize));
  }
  return digests;
}

std::vector<uint64_t> digest_bucket(
    const at::Tensor& bucket, const std::vector<RegionCopy>& copies, const std::vector<at::ScalarType>& dtypes) {
  const char* const base = static_cast<const char*>(bucket.const_data_ptr());
  std::vector<uint64_t> digests;
  digests.reserve(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto& copy = copies[i];
    if (copy.dtype == dtypes[i]) {
      const auto itemsize = static_cast<int64_t>(c10::elementSize(copy.dtype));
      Dims stride;
      for (const auto step : copy.bucket_stride) {
        stride.push_back(step * itemsize);
      }
      digests.push_back(digest(base + copy.bucket_offset, copy.size, stride, itemsize));
      continue;
    }
    const auto converted = at::empty(copy.size, at::TensorOptions().dtype(dtypes[i]));
    RegionCopy whole = copy;
    whole.start.assign(copy.size.size(), 0);
    copy_one_aten(bucket, converted, whole, Direction::kUnpack);
    Checksum sum;
    sum.update(converted.const_data_ptr(), converted.nbytes());
    digests.push_back(sum.value());
  }
  return digests;
}

} // namespace epload
