#include "copy_table.h"

#include "dtypes.h"
#include "tensor_memory.h"

#include <c10/util/Exception.h>

namespace epload {
namespace {

constexpr int64_t kFixedColumns = 4;

void check_tensor_side(int64_t row, const RegionCopy& copy, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      copy.dtype == tensor.scalar_type() || find_dtype(tensor.scalar_type()) != nullptr,
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
  int64_t nbytes = itemsize; // of its elements, of which several may be one in the bucket
  bool empty = false, countable = true;
  for (size_t d = 0; d < copy.size.size(); ++d) {
    TORCH_CHECK_VALUE(
        copy.size[d] >= 0 && copy.bucket_stride[d] >= 0,
        "region_copy: row ",
        row,
        " has a negative size or stride in dim ",
        d);
    empty |= copy.size[d] == 0;
    countable = countable && !__builtin_mul_overflow(nbytes, copy.size[d], &nbytes);
  }
  if (empty) {
    return;
  }
  TORCH_CHECK_VALUE(countable, "region_copy: row ", row, " has more bytes than fit in an int64");
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

} // namespace

void check_bucket(const at::Tensor& bucket) {
  TORCH_CHECK_VALUE(
      bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous(),
      "region_copy: expected the bucket as a contiguous 1-D uint8 tensor, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes());
  check_memory("region_copy's bucket", bucket, 0);
}

std::vector<RegionCopy> decode_copies(const at::Tensor& bucket, at::TensorList tensors, const at::Tensor& table) {
  check_bucket(bucket);
  check_device("region_copy", tensors, bucket.device());
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
    TORCH_CHECK_VALUE(find_dtype(row[2]) != nullptr, "region_copy: row ", r, " has dtype code ", row[2]);
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

} // namespace epload
