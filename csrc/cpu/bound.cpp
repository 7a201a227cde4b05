#include "bound.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <limits>

namespace epload {
namespace {

std::vector<at::TensorImpl*> impls_at(c10::IntArrayRef addresses) {
  std::vector<at::TensorImpl*> impls;
  impls.reserve(addresses.size());
  for (const auto address : addresses) {
    TORCH_CHECK_VALUE(address != 0, "gather: expected addresses of tensors, got 0");
    impls.push_back(reinterpret_cast<at::TensorImpl*>(address)); // NOLINT(performance-no-int-to-ptr)
  }
  return impls;
}

// What a region's place in a tensor follows from.
void add_layout(std::vector<int64_t>& layouts, const at::Tensor& tensor) {
  layouts.push_back(static_cast<int64_t>(tensor.scalar_type()));
  if (tensor.layout() != at::kStrided) {
    layouts.push_back(-1);
    return;
  }
  layouts.push_back(tensor.dim());
  layouts.insert(layouts.end(), tensor.sizes().begin(), tensor.sizes().end());
  layouts.insert(layouts.end(), tensor.strides().begin(), tensor.strides().end());
}

// Whether that is how `layouts` begins, which then is what comes after it.
bool takes_layout(c10::IntArrayRef& layouts, const at::Tensor& tensor) {
  const bool dense = tensor.layout() == at::kStrided;
  const auto dims = dense ? static_cast<size_t>(tensor.dim()) : 0;
  if (layouts.size() < 2 + 2 * dims || layouts[0] != static_cast<int64_t>(tensor.scalar_type()) ||
      layouts[1] != (dense ? tensor.dim() : -1)) {
    return false;
  }
  if (dense && (layouts.slice(2, dims) != tensor.sizes() || layouts.slice(2 + dims, dims) != tensor.strides())) {
    return false;
  }
  layouts = layouts.slice(2 + 2 * dims);
  return true;
}

} // namespace

Borrowed::Borrowed(const std::vector<at::TensorImpl*>& tensors) {
  tensors_.reserve(tensors.size());
  for (auto* const tensor : tensors) {
    tensors_.emplace_back(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(tensor));
  }
}

Borrowed::~Borrowed() {
  for (auto& tensor : tensors_) {
    (void)tensor.unsafeReleaseTensorImpl();
  }
}

Gathered::Gathered(c10::IntArrayRef addresses, const at::Tensor& known) : tensors_(impls_at(addresses)) {
  const auto& tensors = *tensors_;
  data_.assign(tensors.size(), nullptr);
  c10::IntArrayRef left;
  bool same = known.defined();
  if (same) {
    left = {known.const_data_ptr<int64_t>(), static_cast<size_t>(known.numel())};
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_ahead(tensors, i);
    const auto& it = tensors[i];
    if (it.unsafeGetTensorImpl()->is_python_dispatch()) {
      foreign_ = true;
      return;
    }
    same = same && takes_layout(left, it);
    // A copy that is made only when it is written to is made for what is written to.
    if (it.is_cpu() && has_memory(it) && !c10::impl::cow::is_cow_data_ptr(it.storage().data_ptr())) {
      data_[i] = static_cast<char*>(const_cast<void*>(it.const_data_ptr()));
    }
  }
  if (same && left.empty()) {
    layouts_ = known;
    return;
  }
  std::vector<int64_t> layouts;
  for (const auto& tensor : tensors) {
    add_layout(layouts, tensor);
  }
  layouts_ = at::empty({static_cast<int64_t>(layouts.size())}, at::kLong);
  std::copy(layouts.begin(), layouts.end(), layouts_.mutable_data_ptr<int64_t>());
}

Borrowed Gathered::some(c10::IntArrayRef which) const {
  TORCH_CHECK_VALUE(!foreign_, "load: expected tensors with memory of their own");
  const auto& tensors = *tensors_;
  std::vector<at::TensorImpl*> found;
  found.reserve(which.size());
  for (const auto i : which) {
    TORCH_CHECK_VALUE(
        i >= 0 && i < static_cast<int64_t>(tensors.size()),
        "load: expected the number of one of ",
        tensors.size(),
        " tensors, got ",
        i);
    found.push_back(tensors[i].unsafeGetTensorImpl());
  }
  return Borrowed(found);
}

Memory Gathered::memory(c10::IntArrayRef which) const {
  Memory memory;
  memory.data.reserve(which.size());
  for (const auto i : which) {
    auto* data = data_[i];
    if (data == nullptr) {
      const auto& tensor = (*tensors_)[i];
      check_memory("load", tensor, i);
      TORCH_CHECK_VALUE(tensor.is_cpu(), "load: expected tensors on cpu, tensor ", i, " is on ", tensor.device());
      data = static_cast<char*>(tensor.data_ptr());
    }
    memory.data.push_back(data);
  }
  memory.tensor = [this, which](int64_t i) -> const at::Tensor& { return (*tensors_)[which[i]]; };
  return memory;
}

void Gathered::written(c10::IntArrayRef which) const {
  for (const auto i : which) {
    auto* const impl = (*tensors_)[i].unsafeGetTensorImpl();
    if (!impl->is_inference()) {
      impl->bump_version();
    }
  }
}

Which::Which(const Gathered& tensors, c10::IntArrayRef which) : which_(which.vec()), layouts_(tensors.layouts()) {
}

c10::IntArrayRef Which::of(const Gathered& tensors) const {
  TORCH_CHECK_VALUE(
      tensors.layouts().is_same(layouts_),
      "load: expected tensors of the dtypes, shapes and strides that these regions were bound to");
  return which_;
}

BoundCopies::BoundCopies(const Gathered& tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes)
    : which_(tensors, which), nbytes_(nbytes), regions_([&] {
        const auto some = tensors.some(which);
        return Regions(*some, decode_copies(nbytes, *some, copies));
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
            files, file_count, *some, decode_copies(std::numeric_limits<int64_t>::max(), *some, copies, offsets));
      }()) {
}

ReadOutcome BoundReads::run(c10::IntArrayRef descriptors, const Gathered& tensors, int64_t threads) const {
  const auto which = which_.of(tensors);
  const auto outcome = reads_.run(descriptors, tensors.memory(which), threads);
  tensors.written(which);
  return outcome;
}

BoundDigests::BoundDigests(const Gathered& tensors, c10::IntArrayRef which, const at::Tensor& copies)
    : which_(tensors, which) {
  const auto some = tensors.some(which);
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), *some, copies);
  boxes_.reserve(rows.size());
  for (const auto& row : rows) {
    const auto& tensor = (*some)[row.tensor];
    if (converts(row, tensor.scalar_type())) {
      converted_.emplace_back(boxes_.size(), row);
      boxes_.emplace_back(row.tensor, MemoryBox());
    } else {
      boxes_.emplace_back(row.tensor, box_in_tensor(tensor, row));
    }
  }
}

std::vector<uint64_t> BoundDigests::digests(const Gathered& tensors) const {
  constexpr int64_t kAhead = 1024; // bytes of the next box, where the processor does not look by itself
  const auto memory = tensors.memory(which_.of(tensors));
  std::vector<uint64_t> found;
  found.reserve(boxes_.size());
  for (size_t i = 0; i < boxes_.size(); ++i) {
    if (i + 1 < boxes_.size()) {
      const auto& [tensor, box] = boxes_[i + 1];
      for (int64_t at = 0; at < std::min(kAhead, box.run); at += 64) {
        __builtin_prefetch(memory.data[tensor] + box.begin + at);
      }
    }
    const auto& [tensor, box] = boxes_[i];
    found.push_back(digest(memory.data[tensor], box));
  }
  for (const auto& [row, copy] : converted_) {
    found[row] = digest_converted(memory.tensor(copy.tensor), copy);
  }
  return found;
}

} // namespace epload
