#include "bound.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

namespace epload {
namespace {

// What a region's place in a tensor follows from.
void add_layout(std::vector<int64_t>& layouts, const at::Tensor& tensor) {
  layouts.push_back(static_cast<int64_t>(tensor.scalar_type()));
  layouts.push_back(tensor.dim());
  layouts.insert(layouts.end(), tensor.sizes().begin(), tensor.sizes().end());
  layouts.insert(layouts.end(), tensor.strides().begin(), tensor.strides().end());
}

// Whether that is how `layouts` begins, which then is what comes after it.
bool takes_layout(c10::IntArrayRef& layouts, const at::Tensor& tensor) {
  const auto dims = static_cast<size_t>(tensor.dim());
  if (layouts.size() < 2 + 2 * dims || layouts[0] != static_cast<int64_t>(tensor.scalar_type()) ||
      layouts[1] != tensor.dim() || layouts.slice(2, dims) != tensor.sizes() ||
      layouts.slice(2 + dims, dims) != tensor.strides()) {
    return false;
  }
  layouts = layouts.slice(2 + 2 * dims);
  return true;
}

} // namespace

Gathered::Gathered(c10::IntArrayRef addresses, const at::Tensor& known) {
  tensors_.reserve(addresses.size());
  for (const auto address : addresses) {
    TORCH_CHECK_VALUE(address != 0, "gather: expected addresses of tensors, got 0");
    tensors_.push_back(reinterpret_cast<at::TensorImpl*>(address)); // NOLINT(performance-no-int-to-ptr)
  }
  data_.assign(tensors_.size(), nullptr);
  c10::IntArrayRef left;
  bool same = known.defined();
  if (same) {
    left = {known.const_data_ptr<int64_t>(), static_cast<size_t>(known.numel())};
  }
  const auto impl_of = [this](size_t i) { return tensors_[i]; };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    fetch_ahead(tensors_.size(), i, impl_of);
    const auto it = tensor(static_cast<int64_t>(i));
    if (tensors_[i]->is_python_dispatch()) {
      foreign_ = true;
      return;
    }
    TORCH_CHECK_VALUE(
        it.is_cpu() && it.layout() == at::kStrided,
        "gather: expected dense tensors on cpu, tensor ",
        i,
        " is ",
        it.toString());
    same = same && takes_layout(left, it);
    try {
      check_memory("gather", it, i);
      data_[i] = static_cast<char*>(it.data_ptr());
    } catch (const c10::ValueError& error) {
      if (bad_ < 0) {
        bad_ = static_cast<int64_t>(i);
        why_ = error.what_without_backtrace();
      }
    }
  }
  if (same && left.empty()) {
    layouts_ = known;
    return;
  }
  std::vector<int64_t> layouts;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    add_layout(layouts, tensor(static_cast<int64_t>(i)));
  }
  layouts_ = at::empty({static_cast<int64_t>(layouts.size())}, at::kLong);
  std::copy(layouts.begin(), layouts.end(), layouts_.mutable_data_ptr<int64_t>());
}

at::Tensor Gathered::tensor(int64_t i) const {
  return at::Tensor(
      c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::unsafe_reclaim_from_nonowning(tensors_[i]));
}

std::vector<at::Tensor> Gathered::some(c10::IntArrayRef which) const {
  std::vector<at::Tensor> found;
  found.reserve(which.size());
  TORCH_CHECK_VALUE(!foreign_, "expected tensors with memory of their own");
  for (const auto i : which) {
    TORCH_CHECK_VALUE(
        i >= 0 && i < static_cast<int64_t>(tensors_.size()),
        "expected the number of one of ",
        tensors_.size(),
        " tensors, got ",
        i);
    found.push_back(tensor(i));
  }
  return found;
}

Memory Gathered::memory(c10::IntArrayRef which) const {
  TORCH_CHECK_VALUE(!foreign_ && bad_ < 0, why_);
  Memory memory;
  memory.data.reserve(which.size());
  for (const auto i : which) {
    memory.data.push_back(data_[i]);
  }
  memory.tensor = [this, which](int64_t i) { return tensor(which[i]); };
  return memory;
}

void Gathered::written(c10::IntArrayRef which) const {
  for (const auto i : which) {
    if (!tensors_[i]->is_inference()) {
      tensors_[i]->bump_version();
    }
  }
}

Which::Which(const Gathered& tensors, c10::IntArrayRef which) : which_(which.vec()), layouts_(tensors.layouts()) {
}

c10::IntArrayRef Which::of(const Gathered& tensors) const {
  TORCH_CHECK_VALUE(
      tensors.layouts().is_same(layouts_),
      "expected tensors of the dtypes, shapes and strides that these regions were bound to");
  return which_;
}

BoundCopies::BoundCopies(const Gathered& tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes)
    : which_(tensors, which), nbytes_(nbytes), regions_([&] {
        const auto some = tensors.some(which);
        return Regions(some, decode_copies(nbytes, some, copies));
      }()) {
}

void BoundCopies::unpack(const at::Tensor& bucket, const Gathered& tensors) const {
  TORCH_CHECK_VALUE(
      bucket.is_cpu() && bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous() &&
          bucket.numel() == nbytes_,
      "unpack_bound: expected the bucket as a contiguous uint8 tensor of ",
      nbytes_,
      " bytes on cpu, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes(),
      " on ",
      bucket.device());
  const auto which = which_.of(tensors);
  regions_.copy(bucket, tensors.memory(which), Direction::kUnpack);
  tensors.written(which);
}

BoundReads::BoundReads(
    const Gathered& tensors,
    c10::IntArrayRef which,
    const at::Tensor& copies,
    c10::IntArrayRef files,
    c10::IntArrayRef offsets,
    int64_t file_count)
    : which_(tensors, which), reads_([&] {
        const auto some = tensors.some(which);
        return Reads(
            files, file_count, some, decode_copies(std::numeric_limits<int64_t>::max(), some, copies, offsets));
      }()) {
}

ReadOutcome BoundReads::run(c10::IntArrayRef descriptors, const Gathered& tensors, int64_t threads) const {
  const auto which = which_.of(tensors);
  const auto outcome = reads_.run(descriptors, tensors.memory(which), threads);
  tensors.written(which);
  return outcome;
}

} // namespace epload
