#include "bucket_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace epload {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 4;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("plan_buckets: " + what);
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxBytes) {
    refuse("a tensor's size in bytes overflows");
  }
  return product;
}

void check(const TensorExtent& t, size_t index, int64_t room) {
  const auto name = "tensor " + std::to_string(index);
  if (t.nbytes < 0 || t.nbytes > kMaxBytes) {
    refuse(name + " has " + std::to_string(t.nbytes) + " bytes");
  }
  if (t.nbytes <= room) {
    return;
  }
  if (t.granule <= 0 || t.slab <= 0 || t.slab % t.granule != 0 || t.nbytes % t.slab != 0) {
    refuse(
        name + ": granule " + std::to_string(t.granule) + " must divide slab " + std::to_string(t.slab) +
        ", and slab must divide " + std::to_string(t.nbytes) + " bytes");
  }
  if (t.granule > room) {
    refuse(
        name + ": a granule of " + std::to_string(t.granule) + " bytes does not fit in the " + std::to_string(room) +
        " bytes of a bucket");
  }
}

} // namespace

TensorExtent extent_of(const int64_t* shape, int64_t ndim, int64_t itemsize, int64_t room) {
  if (itemsize <= 0 || room <= 0 || std::any_of(shape, shape + ndim, [](int64_t n) { return n < 0; })) {
    refuse("expected a shape without negative dims, a positive itemsize and room for a bucket");
  }
  int64_t inner = itemsize;
  int64_t dim = ndim - 1;
  for (; dim > 0; --dim) {
    const int64_t next = multiply(inner, shape[dim]);
    if (next > room) {
      break;
    }
    inner = next;
  }
  const int64_t slab = ndim == 0 ? itemsize : multiply(inner, shape[dim]);
  int64_t nbytes = slab;
  for (int64_t outer = 0; outer < dim; ++outer) {
    nbytes = multiply(nbytes, shape[outer]);
  }
  return {nbytes, inner, slab};
}

BucketPlan plan_buckets(const std::vector<TensorExtent>& tensors, int64_t capacity, int64_t alignment, int64_t header) {
  if (alignment <= 0 || alignment > kMaxBytes || header < 0 || header % alignment != 0) {
    refuse(
        "alignment " + std::to_string(alignment) + " must be positive and divide the header of " +
        std::to_string(header) + " bytes");
  }
  if (capacity <= header || capacity > kMaxBytes) {
    refuse(
        "a bucket of " + std::to_string(capacity) + " bytes has no room after a header of " + std::to_string(header) +
        " bytes");
  }
  const int64_t room = capacity - header;
  BucketPlan plan;
  plan.slots.reserve(tensors.size());
  int64_t used = capacity; // of the open bucket; "full" opens the first one

  const auto place = [&](size_t tensor, int64_t offset, int64_t nbytes) {
    const int64_t start = (used + alignment - 1) / alignment * alignment;
    if (start + nbytes > capacity) {
      plan.bucket_nbytes.push_back(header);
      used = header;
    } else {
      used = start;
    }
    plan.slots.push_back(
        {static_cast<int64_t>(tensor), offset, static_cast<int64_t>(plan.bucket_nbytes.size()) - 1, used, nbytes});
    used += nbytes;
    plan.bucket_nbytes.back() = used;
  };

  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    check(t, i, room);
    if (t.nbytes <= room) {
      if (t.nbytes > 0) {
        place(i, 0, t.nbytes);
      }
      continue;
    }
    const int64_t most = room / t.granule * t.granule;
    for (int64_t slab = 0; slab < t.nbytes; slab += t.slab) {
      for (int64_t done = 0; done < t.slab;) {
        const int64_t start = (used + alignment - 1) / alignment * alignment;
        const int64_t left = std::max<int64_t>(capacity - start, 0) / t.granule * t.granule;
        const int64_t take = std::min(t.slab - done, left > 0 ? left : most);
        place(i, slab + done, take);
        done += take;
      }
    }
  }
  return plan;
}

} // namespace epload
