#include "region_copy.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceType.h>

#include <array>

namespace epload {
namespace {

constexpr int64_t kFixedColumns = 4;

std::array<RegionCopyFn, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>& registry() {
  static std::array<RegionCopyFn, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> table{};
  return table;
}

// What Tensor.copy_ converts from and to: not quantized, bit and sub-byte dtypes.
bool convertible(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Byte:
    case at::ScalarType::Char:
    case at::ScalarType::Short:
    case at::ScalarType::Int:
    case at::ScalarType::Long:
    case at::ScalarType::UInt16:
    case at::ScalarType::UInt32:
    case at::ScalarType::UInt64:
    case at::ScalarType::Bool:
    case at::ScalarType::Half:
    case at::ScalarType::BFloat16:
    case at::ScalarType::Float:
    case at::ScalarType::Double:
    case at::ScalarType::ComplexHalf:
    case at::ScalarType::ComplexFloat:
    case at::ScalarType::ComplexDouble:
    case at::ScalarType::Float8_e5m2:
    case at::ScalarType::Float8_e4m3fn:
    case at::ScalarType::Float8_e5m2fnuz:
    case at::ScalarType::Float8_e4m3fnuz:
    case at::ScalarType::Float8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

void check_tensor_side(int64_t row, const RegionCopy& copy, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      copy.dtype == tensor.scalar_type() || (convertible(copy.dtype) && convertible(tensor.scalar_type())),
      "region_copy: row ",
      row,
      " would convert between ",
      copy.dtype,
      " and ",
      tensor.scalar_type());
  for (size_t d = 0; d < copy.size.size(); ++d) {
    const int64_t extent = tensor.size(static_cast<int64_t>(d));
    TORCH_CHECK_VALUE(
        copy.start[d] >= 0 && copy.size[d] >= 0 && copy.size[d] <= extent && copy.start[d] <= extent - copy.size[d],
        "region_copy: row ",
        row,
        " covers [",
        copy.start[d],
        ", ",
        copy.start[d],
        " + ",
        copy.size[d],
        ") of dim ",
        d,
        ", outside tensor ",
        copy.tensor,
        " of shape ",
        tensor.sizes());
  }
}

void check_bucket_side(int64_t row, const RegionCopy& copy, int64_t bucket_nbytes) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(copy.dtype));
  bool empty = false;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    TORCH_CHECK_VALUE(
        copy.size[d] >= 0 && copy.bucket_stride[d] >= 0,
        "region_copy: row ",
        row,
        " has a negative size or stride in dim ",
        d);
    empty |= copy.size[d] == 0;
  }
  if (empty) {
    return;
  }
  // The last byte the row touches, computed so that no intermediate can overflow.
  int64_t last = copy.bucket_offset;
  bool inside = last >= 0 && last <= bucket_nbytes - itemsize;
  for (size_t d = 0; inside && d < copy.size.size(); ++d) {
    int64_t span = 0;
    inside = !__builtin_mul_overflow(copy.size[d] - 1, copy.bucket_stride[d], &span) &&
             !__builtin_mul_overflow(span, itemsize, &span) && span <= bucket_nbytes - itemsize - last;
    last += inside ? span : 0;
  }
  TORCH_CHECK_VALUE(inside, "region_copy: row ", row, " reaches outside the bucket of ", bucket_nbytes, " bytes");
}

// Of a dense strided tensor, whether its storage holds every element.
bool storage_holds(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return tensor.numel() == 0 ||
         static_cast<int64_t>(tensor.storage().nbytes()) / static_cast<int64_t>(tensor.element_size()) > last;
}

} // namespace

void fetch_ahead(at::TensorList tensors, size_t i) {
  constexpr size_t kImpl = 16, kStorage = 8;
  if (i + kImpl < tensors.size()) {
    fetch_tensor(tensors[i + kImpl]);
  }
  if (i + kStorage < tensors.size()) {
    fetch_storage(tensors[i + kStorage]);
  }
}

void fetch_tensor(const at::Tensor& tensor) {
  const auto* const impl = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (size_t at = 0; at < sizeof(c10::TensorImpl); at += 64) {
    __builtin_prefetch(impl + at);
  }
}

void fetch_storage(const at::Tensor& tensor) {
  if (tensor.has_storage()) {
    __builtin_prefetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
}

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

const int64_t* numbers_of(const char* op, const char* name, const at::Tensor& table, int64_t dims) {
  TORCH_CHECK_VALUE(
      table.is_cpu() && table.layout() == at::kStrided && !table.is_nested() && table.scalar_type() == at::kLong &&
          table.dim() == dims && table.is_contiguous(),
      op,
      ": expected ",
      name,
      " as a contiguous ",
      dims,
      "-D int64 CPU tensor, got ",
      table.scalar_type(),
      " of shape ",
      table.sizes(),
      " on ",
      table.device());
  check_memory(op, table, 0);
  return table.const_data_ptr<int64_t>();
}

std::vector<RegionCopy> decode_copies(const at::Tensor& bucket, at::TensorList tensors, const at::Tensor& table) {
  TORCH_CHECK_VALUE(
      bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous(),
      "region_copy: expected the bucket as a contiguous 1-D uint8 tensor, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes());
  check_memory("region_copy's bucket", bucket, 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_ahead(tensors, i);
    TORCH_CHECK_VALUE(
        tensors[i].device() == bucket.device(),
        "region_copy: the bucket is on ",
        bucket.device(),
        " but tensor ",
        i,
        " is on ",
        tensors[i].device());
  }
  return decode_copies(bucket.numel(), tensors, table);
}

std::vector<RegionCopy> decode_copies(int64_t nbytes, const at::Tensor& table, c10::IntArrayRef offsets) {
  const auto* row = numbers_of("region_copy", "the copy table", table, 2);
  const int64_t columns = table.size(1);
  const int64_t max_dims = (columns - kFixedColumns) / 3;
  TORCH_CHECK_VALUE(
      columns >= kFixedColumns && (columns - kFixedColumns) % 3 == 0,
      "region_copy: expected a copy table of 4 + 3 * D columns, got ",
      columns);
  std::vector<RegionCopy> copies;
  copies.reserve(table.size(0));
  for (int64_t r = 0; r < table.size(0); ++r, row += columns) {
    TORCH_CHECK_VALUE(
        row[2] >= 0 && row[2] < static_cast<int64_t>(at::ScalarType::Undefined),
        "region_copy: row ",
        r,
        " has dtype code ",
        row[2]);
    const int64_t ndim = row[3];
    TORCH_CHECK_VALUE(
        ndim >= 0 && ndim <= max_dims,
        "region_copy: row ",
        r,
        " has ",
        ndim,
        " dims and the table has room for ",
        max_dims);
    const auto* start = row + kFixedColumns;
    const auto* size = start + max_dims;
    const auto* stride = size + max_dims;
    copies.push_back(
        {row[0],
         offsets.empty() ? row[1] : offsets[r],
         static_cast<at::ScalarType>(row[2]),
         Dims(start, start + ndim),
         Dims(size, size + ndim),
         Dims(stride, stride + ndim)});
    check_bucket_side(r, copies.back(), nbytes);
  }
  return copies;
}

std::vector<RegionCopy> decode_copies(
    int64_t nbytes, at::TensorList tensors, const at::Tensor& table, c10::IntArrayRef offsets) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_memory("region_copy", tensors[i], i);
  }
  auto copies = decode_copies(nbytes, table, offsets);
  for (size_t r = 0; r < copies.size(); ++r) {
    const auto& copy = copies[r];
    TORCH_CHECK_VALUE(
        copy.tensor >= 0 && copy.tensor < static_cast<int64_t>(tensors.size()),
        "region_copy: row ",
        r,
        " names tensor ",
        copy.tensor,
        " of ",
        tensors.size());
    const auto& tensor = tensors[copy.tensor];
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(copy.size.size()) == tensor.dim(),
        "region_copy: row ",
        r,
        " has ",
        copy.size.size(),
        " dims, tensor ",
        copy.tensor,
        " has ",
        tensor.dim());
    check_tensor_side(static_cast<int64_t>(r), copy, tensor);
  }
  return copies;
}

void copy_one_aten(const at::Tensor& bucket, const at::Tensor& tensor, const RegionCopy& copy, Direction direction) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(copy.dtype));
  int64_t offset = tensor.storage_offset();
  int64_t span = 1;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    if (copy.size[d] == 0) {
      return;
    }
    offset += copy.start[d] * tensor.stride(static_cast<int64_t>(d));
    span += (copy.size[d] - 1) * copy.bucket_stride[d];
  }
  const auto theirs = at::as_strided(tensor, copy.size, tensor.strides(), offset);
  auto bytes = bucket.narrow(0, copy.bucket_offset, span * itemsize);
  if ((bucket.storage_offset() + copy.bucket_offset) % itemsize != 0) {
    // A view of a wider dtype needs an aligned start: go through a packed copy, its elements as rows of bytes. Only
    // bytes of the region are touched, since another region may lie between them.
    Dims bytes_size(copy.size), bytes_stride;
    bytes_size.push_back(itemsize);
    for (const auto stride : copy.bucket_stride) {
      bytes_stride.push_back(stride * itemsize);
    }
    bytes_stride.push_back(1);
    const auto elements = bytes.as_strided(bytes_size, bytes_stride, bytes.storage_offset());
    if (direction == Direction::kUnpack) {
      theirs.copy_(elements.clone(at::MemoryFormat::Contiguous).view(copy.dtype).squeeze(-1), /*non_blocking=*/true);
    } else {
      elements.copy_(theirs.to(copy.dtype).contiguous().unsqueeze(-1).view(at::kByte), /*non_blocking=*/true);
    }
    return;
  }
  const auto typed = bytes.view(copy.dtype);
  const auto ours = typed.as_strided(copy.size, copy.bucket_stride, typed.storage_offset());
  if (direction == Direction::kUnpack) {
    theirs.copy_(ours, /*non_blocking=*/true);
  } else {
    ours.copy_(theirs, /*non_blocking=*/true);
  }
}

void region_copy_aten(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  for (const auto& copy : copies) {
    copy_one_aten(bucket, tensors[copy.tensor], copy, direction);
  }
}

void region_copy(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  const auto fn = registry().at(static_cast<size_t>(bucket.device().type()));
  (fn != nullptr ? fn : region_copy_aten)(bucket, tensors, copies, direction);
}

RegisterRegionCopy::RegisterRegionCopy(c10::DeviceType device, RegionCopyFn fn) {
  registry().at(static_cast<size_t>(device)) = fn;
}

} // namespace epload
