#include "bound.h"

#include <limits>
#include <utility>

namespace epload {
namespace {

// Adds what a region's place in a tensor follows from.
void add_layout(std::vector<int64_t>& layouts, const at::Tensor& tensor) {
  layouts.push_back(static_cast<int64_t>(tensor.scalar_type()));
  layouts.push_back(tensor.dim());
  layouts.insert(layouts.end(), tensor.sizes().begin(), tensor.sizes().end());
  layouts.insert(layouts.end(), tensor.strides().begin(), tensor.strides().end());
}

// Whether a tensor has the layout at `at`, which then is where the next one's begins.
bool has_layout(const std::vector<int64_t>& layouts, size_t& at, const at::Tensor& tensor) {
  const auto dims = static_cast<size_t>(layouts[at + 1]);
  const auto* const known = layouts.data() + at;
  at += 2 + 2 * dims;
  return known[0] == static_cast<int64_t>(tensor.scalar_type()) && static_cast<int64_t>(dims) == tensor.dim() &&
         tensor.sizes() == c10::IntArrayRef(known + 2, dims) &&
         tensor.strides() == c10::IntArrayRef(known + 2 + dims, dims);
}

std::vector<RegionCopy> decode(
    const std::vector<at::Tensor>& tensors, const at::Tensor& copies, int64_t nbytes, c10::IntArrayRef offsets = {}) {
  return decode_copies(nbytes, tensors, copies, offsets);
}

} // namespace

BoundTensors::BoundTensors(at::TensorList tensors) {
  tensors_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_ahead(tensors, i);
    const auto& tensor = tensors[i];
    TORCH_CHECK_VALUE(
        tensor.is_cpu() && tensor.layout() == at::kStrided,
        "bind_tensors: expected dense tensors on cpu, tensor ",
        i,
        " is ",
        tensor.layout(),
        " on ",
        tensor.device());
    tensors_.emplace_back(tensor.getIntrusivePtr());
    add_layout(layouts_, tensor);
  }
}

BoundTensors::State BoundTensors::refresh() {
  State state{true, -1, {}};
  data_.assign(tensors_.size(), nullptr);
  size_t at = 0;
  const auto impl_of = [this](size_t i) { return tensors_[i]._unsafe_get_target(); };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    fetch_ahead(tensors_.size(), i, impl_of);
    auto impl = tensors_[i].lock();
    if (!impl.defined()) {
      state.same = false;
      return state;
    }
    const at::Tensor tensor(std::move(impl));
    if (!has_layout(layouts_, at, tensor)) {
      state.same = false;
      return state;
    }
    try {
      check_memory("load", tensor, i);
      data_[i] = static_cast<char*>(tensor.data_ptr());
    } catch (const c10::ValueError& error) {
      state.bad = static_cast<int64_t>(i);
      state.why = error.what_without_backtrace();
      return state;
    }
  }
  return state;
}

at::Tensor BoundTensors::tensor(int64_t i) const {
  TORCH_CHECK_VALUE(
      i >= 0 && i < static_cast<int64_t>(tensors_.size()), "expected a tensor of ", tensors_.size(), ", got ", i);
  auto impl = tensors_[i].lock();
  TORCH_CHECK_VALUE(impl.defined(), "tensor ", i, " is gone");
  return at::Tensor(std::move(impl));
}

std::vector<at::Tensor> BoundTensors::tensors(c10::IntArrayRef which) const {
  std::vector<at::Tensor> found;
  found.reserve(which.size());
  for (const auto i : which) {
    found.push_back(tensor(i));
  }
  return found;
}

Memory BoundTensors::memory(c10::IntArrayRef which) const {
  TORCH_CHECK_VALUE(data_.size() == tensors_.size(), "expected bound tensors to be refreshed before they are used");
  Memory memory;
  memory.data.reserve(which.size());
  for (const auto i : which) {
    memory.data.push_back(data_[i]);
  }
  memory.tensor = [this, which](int64_t i) { return tensor(which[i]); };
  return memory;
}

void BoundTensors::written(c10::IntArrayRef which) const {
  for (const auto i : which) {
    auto* const impl = tensors_[i]._unsafe_get_target();
    if (!impl->is_inference()) {
      impl->bump_version();
    }
  }
}

BoundCopies::BoundCopies(
    c10::intrusive_ptr<BoundTensors> tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes)
    : tensors_(std::move(tensors)), which_(which.vec()), nbytes_(nbytes), regions_([&] {
        const auto bound = tensors_->tensors(which);
        return Regions(bound, decode(bound, copies, nbytes));
      }()) {
}

void BoundCopies::unpack(const at::Tensor& bucket) const {
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
  regions_.copy(bucket, tensors_->memory(which_), Direction::kUnpack);
  tensors_->written(which_);
}

BoundReads::BoundReads(
    c10::intrusive_ptr<BoundTensors> tensors,
    c10::IntArrayRef which,
    const at::Tensor& copies,
    c10::IntArrayRef files,
    c10::IntArrayRef offsets,
    int64_t file_count)
    : tensors_(std::move(tensors)), which_(which.vec()), reads_([&] {
        const auto bound = tensors_->tensors(which);
        return Reads(files, file_count, bound, decode(bound, copies, std::numeric_limits<int64_t>::max(), offsets));
      }()) {
}

ReadOutcome BoundReads::run(c10::IntArrayRef descriptors, int64_t threads) const {
  const auto outcome = reads_.run(descriptors, tensors_->memory(which_), threads);
  tensors_->written(which_);
  return outcome;
}

} // namespace epload
