#include "tensor_memory.h"

#include "driver.h"

#include "dtypes.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

namespace epload {
namespace {

// Whether the storage of a dense strided tensor holds every element.
bool storage_holds(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return tensor.numel() == 0 ||
         static_cast<int64_t>(tensor.storage().nbytes()) / static_cast<int64_t>(tensor.element_size()) > last;
}

constexpr int64_t kMemoryColumns = 4;

// A row for each tensor: the addresses at which its memory begins and ends (0 if it has none), its device, its dtype;
// then its sizes and its strides, -1 past its dims.
at::Tensor describe_memory(at::TensorList tensors) {
  int64_t dims = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].layout() == at::kStrided,
        "describe_memory: expected dense strided tensors, tensor ",
        i,
        " is ",
        tensors[i].layout());
    dims = std::max(dims, tensors[i].dim());
  }
  const auto rows = static_cast<int64_t>(tensors.size());
  auto table = at::full({rows, kMemoryColumns + 2 * dims}, -1, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  auto* row = table.mutable_data_ptr<int64_t>();
  for (const auto& tensor : tensors) {
    uint64_t extent = 1; // in elements
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      row[kMemoryColumns + d] = tensor.size(d);
      row[kMemoryColumns + dims + d] = tensor.stride(d);
      extent += static_cast<uint64_t>(tensor.size(d) - 1) * static_cast<uint64_t>(tensor.stride(d));
    }
    const void* memory = tensor.has_storage() && tensor.numel() != 0 ? tensor.storage().data() : nullptr;
    const auto begin =
        reinterpret_cast<uint64_t>(memory) + static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size();
    row[0] = memory == nullptr ? 0 : static_cast<int64_t>(begin);
    row[1] = memory == nullptr ? 0 : static_cast<int64_t>(begin + extent * tensor.element_size());
    row[2] = static_cast<int64_t>(tensor.device().type()) * 256 + tensor.device().index();
    row[3] = static_cast<int64_t>(tensor.scalar_type());
    row += kMemoryColumns + 2 * dims;
  }
  return table;
}

} // namespace

void check_memory(const char* op, const at::Tensor& tensor, size_t index) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(),
      op,
      ": expected dense strided tensors, tensor ",
      index,
      " is ",
      tensor.is_quantized() ? "quantized"
      : tensor.is_nested()  ? "nested"
                            : c10::str(tensor.layout()));
  TORCH_CHECK_VALUE(
      !tensor.is_meta(), op, ": tensor ", index, " is on meta and holds no data; materialize it first (to_empty)");
  const auto plain = driver_of(tensor.device().type()).plain;
  TORCH_CHECK_VALUE(
      plain == nullptr || plain(tensor),
      op,
      ": the elements of tensor ",
      index,
      " lie in one of Ascend's own formats; cast it to ND first (torch_npu.npu_format_cast(tensor, 2))");
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(),
      op,
      ": tensor ",
      index,
      " is a lazy conjugate or negation; pass resolve_conj() / resolve_neg() of it");
  TORCH_CHECK_VALUE(
      storage_holds(tensor),
      op,
      ": tensor ",
      index,
      " of shape ",
      tensor.sizes(),
      " has a storage of ",
      tensor.storage().nbytes(),
      " bytes, too few (was it freed by FSDP?)");
  TORCH_CHECK_VALUE(
      tensor.numel() == 0 || tensor.storage().data_ptr().get() != nullptr,
      op,
      ": tensor ",
      index,
      " of shape ",
      tensor.sizes(),
      " holds no data (does it wrap another tensor? then pass that one)");
}

void check_device(const char* op, at::TensorList tensors, c10::Device device) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].device() == device,
        op,
        ": expected tensors on ",
        device,
        ", tensor ",
        i,
        " is on ",
        tensors[i].device());
  }
}

void check_array(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.scalar_type() == dtype &&
          tensor.dim() == dims && tensor.is_contiguous(),
      op,
      ": expected ",
      name,
      " as a contiguous ",
      dims,
      "-D ",
      find_dtype(dtype)->name,
      " CPU tensor, got ",
      tensor.scalar_type(),
      " of shape ",
      tensor.sizes(),
      " on ",
      tensor.device());
  check_memory(op, tensor, 0);
}

const int64_t* numbers_of(const char* op, const char* name, const at::Tensor& table, int64_t dims) {
  check_array(op, name, table, at::kLong, dims);
  return table.const_data_ptr<int64_t>();
}

void mark_written(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("describe_memory", TORCH_FN(epload::describe_memory));
}
