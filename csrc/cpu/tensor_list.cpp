#include "tensor_list.h"

#include "../tensor_memory.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace {

// Tensors whose ticket has not been used yet.
struct Registered {
  std::mutex lock;
  int64_t last = 0;
  std::unordered_map<int64_t, std::vector<at::Tensor>> tensors;
};

Registered& registered() {
  static auto* const made = new Registered(); // never destroyed: at exit no interpreter is left to release tensors to
  return *made;
}

// References to tensors, given by their TensorImpls.
std::vector<at::Tensor> owned(void* const* impls, uint64_t count) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  constexpr uint64_t kAhead = 16;
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const auto* const next = static_cast<const char*>(impls[i + kAhead]);
      for (size_t at = 0; at < sizeof(at::TensorImpl); at += 64) {
        __builtin_prefetch(next + at, 1);
      }
    }
    auto* const impl = static_cast<at::TensorImpl*>(impls[i]);
    tensors.emplace_back(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(impl));
  }
  return tensors;
}

} // namespace

int64_t epload_register_tensors(void* const* impls, uint64_t count, char* message, uint64_t room) noexcept {
  try {
    auto tensors = owned(impls, count);
    auto& all = registered();
    const std::lock_guard<std::mutex> hold(all.lock);
    const auto ticket = ++all.last;
    all.tensors.emplace(ticket, std::move(tensors));
    return ticket;
  } catch (const std::exception& error) {
    std::snprintf(message, room, "%s", error.what());
  } catch (...) {
    std::snprintf(message, room, "unknown error");
  }
  return 0;
}

int64_t epload_tensor_kinds(void* const* impls, uint64_t count, int64_t* kinds, char* message, uint64_t room) noexcept {
  try {
    const auto tensors = owned(impls, count); // a class may compute the device in Python, and drop some there
    for (uint64_t i = 0; i < count; ++i) {
      const auto device = tensors[i].device();
      *kinds++ = static_cast<int64_t>(tensors[i].scalar_type()) << 32 | static_cast<int64_t>(device.type()) << 16 |
                 (device.index() & 0xffff);
    }
    return 1;
  } catch (const std::exception& error) {
    std::snprintf(message, room, "%s", error.what());
  } catch (...) {
    std::snprintf(message, room, "unknown error");
  }
  return 0;
}

namespace epload {
namespace {

// The tensors of a ticket, which is then used up.
std::vector<at::Tensor> take_registered(int64_t ticket) {
  auto& all = registered();
  const std::lock_guard<std::mutex> hold(all.lock);
  auto found = all.tensors.extract(ticket);
  TORCH_CHECK_VALUE(
      !found.empty(),
      "tensor_list: expected the ticket of tensors that were just registered (epload.ops.tensor_list), got ",
      ticket);
  return std::move(found.mapped());
}

constexpr size_t kTensor = 16, kStorage = 8; // tensors ahead of which each is fetched, as in fetch_ahead

bool has_strides(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested();
}

// Appends what a region's offset in a tensor depends on.
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

// Whether `layouts` begins with the tensor's layout, which is then removed from it.
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

BorrowedTensors::BorrowedTensors(const std::vector<at::TensorImpl*>& tensors) {
  tensors_.reserve(tensors.size());
  for (auto* const tensor : tensors) {
    tensors_.emplace_back(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(tensor));
  }
}

BorrowedTensors::~BorrowedTensors() {
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

TensorList::TensorList(std::vector<at::Tensor> tensors, const c10::intrusive_ptr<Layouts>& known)
    : tensors_(std::move(tensors)) {
  bool same = known && known->count() == tensors_.size();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    fetch_ahead(tensors_, i);
    TORCH_CHECK_VALUE(tensors_[i].defined(), "tensor_list: tensor ", i, " is undefined");
    if (tensors_[i].unsafeGetTensorImpl()->is_python_dispatch()) {
      foreign_ = true;
      return;
    }
    same = same && known->fits(static_cast<int64_t>(i), tensors_[i]);
  }
  layouts_ = same ? known : c10::make_intrusive<Layouts>(tensors_);
}

TensorList::~TensorList() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i + kTensor < tensors_.size()) {
      fetch_tensor(tensors_[i + kTensor]);
    }
    tensors_[i].reset();
  }
}

BorrowedTensors TensorList::select(c10::IntArrayRef which) const {
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
  return BorrowedTensors(found);
}

Memory TensorList::memory(c10::IntArrayRef which) const {
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

void TensorList::mark_written(c10::IntArrayRef which) const {
  for (const auto i : which) {
    auto* const impl = tensors_[i].unsafeGetTensorImpl();
    if (!impl->is_inference()) {
      impl->bump_version();
    }
  }
}

Selection::Selection(const TensorList& tensors, c10::IntArrayRef which)
    : which_(which.vec()), layouts_(tensors.layouts()) {
}

c10::IntArrayRef Selection::of(const TensorList& tensors) const {
  TORCH_CHECK_VALUE(
      tensors.layouts() == layouts_,
      "load: expected tensors of the dtypes, shapes and strides that these regions were prepared for");
  return which_;
}

void register_tensor_list_classes() {
  static const bool registered = [] {
    torch::class_<TensorList>("epload", "TensorList");
    torch::class_<Layouts>("epload", "Layouts");
    return true;
  }();
  (void)registered;
}

namespace {

std::tuple<c10::intrusive_ptr<TensorList>, bool> tensor_list(
    int64_t ticket, const std::optional<c10::intrusive_ptr<Layouts>>& known) {
  auto tensors = c10::make_intrusive<TensorList>(take_registered(ticket), known.value_or(nullptr));
  return {tensors, tensors->foreign()};
}

c10::intrusive_ptr<Layouts> layouts(const c10::intrusive_ptr<TensorList>& tensors) {
  TORCH_CHECK_VALUE(!tensors->foreign(), "layouts: expected tensors with memory of their own");
  return tensors->layouts();
}

bool has_layouts(const c10::intrusive_ptr<TensorList>& tensors, const c10::intrusive_ptr<Layouts>& layouts) {
  return tensors->layouts() == layouts;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_tensor_list_classes();
  m.impl("tensor_list", TORCH_FN(epload::tensor_list));
  m.impl("layouts", TORCH_FN(epload::layouts));
  m.impl("has_layouts", TORCH_FN(epload::has_layouts));
}
