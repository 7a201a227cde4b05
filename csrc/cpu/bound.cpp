#include "bound.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epload {
namespace {

constexpr size_t kTensor = 16, kStorage = 8; // what is fetched so many tensors ahead, as in fetch_ahead

bool has_strides(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested();
}

// What a region's place in a tensor follows from.
void add_layout(std::vector<int64_t>& layouts, const at::Tensor& tensor) {
  layouts.push_back(static_cast<int64_t>(tensor.scalar_type()));
  if (!has_strides(tensor)) {
    layouts.push_back(-1);
    return;
  }
  layouts.push_back(tensor.dim());
  layouts.insert(layouts.end(), tensor.sizes().begin(), tensor.sizes().end());
  layouts.insert(layouts.end(), tensor.strides().begin(), tensor.strides().end());
}

// Whether that is how `layouts` begins, which then is what comes after it.
bool takes_layout(c10::IntArrayRef& layouts, const at::Tensor& tensor) {
  const bool dense = has_strides(tensor);
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

Layouts::Layouts(const std::vector<at::Tensor>& tensors) {
  begins_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_ahead(tensors, i);
    begins_.push_back(words_.size());
    add_layout(words_, tensors[i]);
  }
}

bool Layouts::fits(int64_t i, const at::Tensor& tensor) const {
  c10::IntArrayRef left = words_;
  left = left.slice(begins_[i]);
  return takes_layout(left, tensor);
}

Gathered::Gathered(std::vector<at::Tensor> tensors, const c10::intrusive_ptr<Layouts>& known)
    : tensors_(std::move(tensors)) {
  bool same = known && known->count() == tensors_.size();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    fetch_ahead(tensors_, i);
    TORCH_CHECK_VALUE(tensors_[i].defined(), "gather: tensor ", i, " is undefined");
    if (tensors_[i].unsafeGetTensorImpl()->is_python_dispatch()) {
      foreign_ = true;
      return;
    }
    same = same && known->fits(static_cast<int64_t>(i), tensors_[i]);
  }
  layouts_ = same ? known : c10::make_intrusive<Layouts>(tensors_);
}

Gathered::~Gathered() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i + kTensor < tensors_.size()) {
      fetch_tensor(tensors_[i + kTensor]);
    }
    tensors_[i].reset();
  }
}

Borrowed Gathered::some(c10::IntArrayRef which) const {
  TORCH_CHECK_VALUE(!foreign_, "load: expected tensors with memory of their own");
  const auto& tensors = tensors_;
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
  for (size_t at = 0; at < which.size(); ++at) {
    if (at + kTensor < which.size()) {
      fetch_tensor(tensors_[which[at + kTensor]]);
    }
    if (at + kStorage < which.size()) {
      fetch_storage(tensors_[which[at + kStorage]]);
    }
    const auto i = which[at];
    const auto& tensor = tensors_[i];
    check_memory("load", tensor, i);
    TORCH_CHECK_VALUE(tensor.is_cpu(), "load: expected tensors on cpu, tensor ", i, " is on ", tensor.device());
    TORCH_CHECK_VALUE(
        layouts_->fits(i, tensor),
        "load: tensor ",
        i,
        " was given another dtype, shape or strides since the load began; it now has shape ",
        tensor.sizes(),
        " and strides ",
        tensor.strides());
    memory.data.push_back(static_cast<char*>(tensor.data_ptr()));
  }
  memory.tensor = [this, which](int64_t i) -> const at::Tensor& { return tensors_[which[i]]; };
  return memory;
}

void Gathered::written(c10::IntArrayRef which) const {
  for (const auto i : which) {
    auto* const impl = tensors_[i].unsafeGetTensorImpl();
    if (!impl->is_inference()) {
      impl->bump_version();
    }
  }
}

Which::Which(const Gathered& tensors, c10::IntArrayRef which) : which_(which.vec()), layouts_(tensors.layouts()) {
}

c10::IntArrayRef Which::of(const Gathered& tensors) const {
  TORCH_CHECK_VALUE(
      tensors.layouts() == layouts_,
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
  check_memory("unpack_bound's bucket", bucket, 0);
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
