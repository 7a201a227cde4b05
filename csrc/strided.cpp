#include "strided.h"

#include <algorithm>
#include <numeric>

namespace epload {

int64_t span_of(const RegionCopy& copy) {
  int64_t elements = 1;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    if (copy.size[d] == 0) {
      return 0;
    }
    elements += (copy.size[d] - 1) * copy.bucket_stride[d];
  }
  return elements * static_cast<int64_t>(c10::elementSize(copy.dtype));
}

Dims innermost_first(const RegionCopy& copy) {
  Dims dims(copy.size.size());
  std::iota(dims.rbegin(), dims.rend(), 0);
  std::stable_sort(
      dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return copy.bucket_stride[a] < copy.bucket_stride[b]; });
  return dims;
}

bool halve(const RegionCopy& copy, RegionCopy& first, RegionCopy& second) {
  size_t widest = copy.size.size();
  for (size_t d = 0; d < copy.size.size(); ++d) {
    if (copy.size[d] > 1 && (widest == copy.size.size() || copy.bucket_stride[d] > copy.bucket_stride[widest])) {
      widest = d;
    }
  }
  if (widest == copy.size.size()) {
    return false;
  }
  const int64_t half = copy.size[widest] / 2;
  first = second = copy;
  first.size[widest] = half;
  second.size[widest] -= half;
  second.start[widest] += half;
  second.bucket_offset += half * copy.bucket_stride[widest] * static_cast<int64_t>(c10::elementSize(copy.dtype));
  return true;
}

Strided collapse(const at::Tensor& tensor, const RegionCopy& copy) {
  const auto ours = static_cast<int64_t>(tensor.element_size());
  const auto theirs = static_cast<int64_t>(c10::elementSize(copy.dtype));
  Strided s{0, copy.bucket_offset, 1, {}, {}, {}};
  bool empty = false;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    const int64_t size = copy.size[d];
    const int64_t step = tensor.stride(d) * ours;
    const int64_t bucket_step = copy.bucket_stride[d] * theirs;
    s.tensor += copy.start[d] * step;
    empty |= size == 0;
    if (size == 1) {
      continue;
    }
    if (s.size.empty() && step == s.run * ours && bucket_step == s.run * theirs) {
      s.run *= size;
    } else if (
        !s.size.empty() && step == s.tensor_stride.back() * s.size.back() &&
        bucket_step == s.bucket_stride.back() * s.size.back()) {
      s.size.back() *= size;
    } else {
      s.size.push_back(size);
      s.tensor_stride.push_back(step);
      s.bucket_stride.push_back(bucket_step);
    }
  }
  if (empty) {
    s.run = 0;
  }
  std::reverse(s.size.begin(), s.size.end());
  std::reverse(s.tensor_stride.begin(), s.tensor_stride.end());
  std::reverse(s.bucket_stride.begin(), s.bucket_stride.end());
  return s;
}

} // namespace epload
