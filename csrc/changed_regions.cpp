// Changes of regions of tensors, encoded as those of the bucket that is packed from them: without packing it.
#include "changes.h"
#include "copy_table.h"
#include "region_copy.h"
#include "strided.h"
#include "tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace epload {
namespace {

int64_t bytes_in(const RegionCopy& row) {
  return c10::multiply_integers(row.size) * static_cast<int64_t>(c10::elementSize(row.dtype));
}

// The size of what is compared in a region: an element, or a half of a wide one.
int64_t unit_of(const RegionCopy& row) {
  return std::min<int64_t>(static_cast<int64_t>(c10::elementSize(row.dtype)), 8);
}

// The bytes of a region of a tensor on CPU, one after the other, from a multiple of `unit` on: those of the tensor,
// whose memory is `data`, or a copy in `scratch`.
template <typename Byte>
Byte* bytes_of(Byte* data, const at::Tensor& tensor, const RegionCopy& row, at::Tensor& scratch) {
  const auto strided = collapse(tensor, row);
  if (strided.size.empty() && is_aligned(data + strided.tensor, unit_of(row))) {
    return data + strided.tensor;
  }
  if (!scratch.defined() || scratch.numel() < bytes_in(row)) {
    scratch = at::empty({bytes_in(row)}, at::kByte);
  }
  auto packed = row;
  packed.tensor = packed.bucket_offset = 0;
  region_copy(scratch, {tensor}, {packed}, Direction::kPack);
  return scratch.mutable_data_ptr<uint8_t>();
}

const uint8_t* bytes_of(const at::Tensor& tensor, const RegionCopy& row, at::Tensor& scratch) {
  return bytes_of(static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor, row, scratch);
}

// The regions of tensors on CPU that lie in a bucket from `begin` to `end`, one after the other, each without gaps and
// of its tensor's dtype.
std::vector<RegionCopy> regions_of(
    const char* op, at::TensorList tensors, const at::Tensor& copies, int64_t begin, int64_t end) {
  TORCH_CHECK_VALUE(0 <= begin && begin <= end, op, ": expected a begin and an end behind it, got ", begin, ", ", end);
  check_device(op, tensors, at::kCPU);
  auto rows = decode_copies(end, tensors, copies);
  for (const auto& row : rows) {
    const auto dtype = tensors[row.tensor].scalar_type();
    TORCH_CHECK_VALUE(dtype == row.dtype, op, ": expected tensors of ", row.dtype, ", as the copies say, got ", dtype);
    TORCH_CHECK_VALUE(
        span_of(row) == bytes_in(row) && row.bucket_offset >= begin,
        op,
        ": expected regions that follow one another without gaps");
    begin = row.bucket_offset + bytes_in(row);
  }
  return rows;
}

// Throws ValueError unless these are tensors as those of the base, or the bucket that has been packed from them.
void check_changed(
    const char* op,
    at::TensorList base,
    at::TensorList changed,
    int64_t end,
    const at::Tensor& out,
    const std::optional<at::Tensor>& bucket) {
  if (bucket.has_value()) {
    check_array(op, "the bucket", *bucket, at::kByte, 1);
    TORCH_CHECK_VALUE(
        bucket->numel() >= end && changed.empty(),
        op,
        ": expected a bucket of at least ",
        end,
        " bytes and no changed tensors, got ",
        bucket->numel(),
        " bytes and ",
        changed.size(),
        " tensors");
    TORCH_CHECK_VALUE(!out.is_alias_of(*bucket), op, ": expected out to be other memory");
    return;
  }
  TORCH_CHECK_VALUE(
      changed.size() == base.size(), op, ": expected ", base.size(), " changed tensors, got ", changed.size());
  for (size_t i = 0; i < changed.size(); ++i) {
    const auto& tensor = changed[i];
    const auto dtype = base[i].scalar_type();
    TORCH_CHECK_VALUE(
        tensor.is_cpu() && tensor.sizes() == base[i].sizes() && tensor.scalar_type() == dtype,
        op,
        ": expected changed tensor ",
        i,
        " to be as that of the base, ",
        dtype,
        " of ",
        base[i].sizes(),
        " on cpu, got ",
        tensor.scalar_type(),
        " of ",
        tensor.sizes(),
        " on ",
        tensor.device());
    check_memory(op, tensor, i);
    TORCH_CHECK_VALUE(!out.is_alias_of(tensor), op, ": expected out to be other memory");
  }
}

// Encodes the differences between regions of tensors and those of others, or of the bucket that has been packed from
// the others.
std::tuple<int64_t, int64_t> encode_regions(
    at::TensorList base,
    at::TensorList changed,
    const at::Tensor& copies,
    int64_t begin,
    int64_t end,
    at::Tensor& out,
    const std::optional<at::Tensor>& bucket) {
  constexpr auto op = "encode_regions";
  const at::NoGradGuard no_grad;
  check_array(op, "out", out, at::kByte, 1);
  const auto rows = regions_of(op, base, copies, begin, end);
  check_changed(op, base, changed, end, out, bucket);
  for (const auto& tensor : base) {
    TORCH_CHECK_VALUE(!out.is_alias_of(tensor), op, ": expected out to be other memory");
  }
  ChangesOutput output{out.mutable_data_ptr<uint8_t>(), out.numel()};
  at::Tensor scratch, other;
  int64_t at = begin, count = 0;
  const auto skip = [&](int64_t until) { // bytes of no region, which are equal
    static const std::vector<uint8_t> zeros(kChunkUnits);
    for (; at < until; at += std::min(until - at, kChunkUnits)) {
      encode_block(op, zeros.data(), zeros.data(), std::min(until - at, kChunkUnits), 1, output);
    }
  };
  for (const auto& row : rows) {
    skip(row.bucket_offset);
    const auto* const from = bytes_of(base[row.tensor], row, scratch);
    const auto* const to = bucket.has_value() ? bucket->const_data_ptr<uint8_t>() + row.bucket_offset
                                              : bytes_of(changed[row.tensor], row, other);
    count += encode_block(op, from, to, bytes_in(row), unit_of(row), output);
    at += bytes_in(row);
  }
  skip(end);
  mark_written({out});
  return {output.nbytes, count};
}

// Decodes the block of each region, and those between, which change nothing. Writes the regions if `writes` is set.
int64_t decode_regions(
    const char* op,
    ChangesInput in,
    at::TensorList base,
    const std::vector<RegionCopy>& rows,
    int64_t begin,
    int64_t end,
    bool writes) {
  at::Tensor scratch;
  int64_t at = begin, changed = 0;
  const auto skip = [&](int64_t until) {
    int64_t none = 0;
    while (at < until) {
      const auto length = decode_block(op, in, at - begin, until - begin, nullptr, false, none);
      TORCH_CHECK_VALUE(length > 0 && none == 0, op, ": expected no changes between regions");
      at += length;
    }
  };
  for (const auto& row : rows) {
    skip(row.bucket_offset);
    const auto& tensor = base[row.tensor];
    TORCH_CHECK_VALUE(
        in.left > kUnitAt && in.data[kUnitAt] == unit_of(row), op, ": expected a block in units of ", unit_of(row));
    auto* const bytes =
        writes ? bytes_of(static_cast<uint8_t*>(tensor.mutable_data_ptr()), tensor, row, scratch) : nullptr;
    const auto nbytes = bytes_in(row);
    const auto length = decode_block(op, in, at - begin, at - begin + nbytes, bytes, writes, changed);
    TORCH_CHECK_VALUE(length == nbytes, op, ": expected a block of ", nbytes, " bytes, got one of ", length);
    at += nbytes;
    if (scratch.defined() && bytes == scratch.const_data_ptr<uint8_t>()) {
      auto unpacked = row;
      unpacked.bucket_offset = 0;
      region_copy(scratch, base, {unpacked}, Direction::kUnpack);
    }
  }
  skip(end);
  TORCH_CHECK_VALUE(in.left == 0, op, ": expected changes of ", end - begin, " bytes, got those of more");
  return changed;
}

int64_t apply_regions(
    const at::Tensor& encoded, at::TensorList base, const at::Tensor& copies, int64_t begin, int64_t end) {
  constexpr auto op = "apply_regions";
  const at::NoGradGuard no_grad;
  const auto in = changes_in(op, encoded);
  const auto rows = regions_of(op, base, copies, begin, end);
  for (const auto& tensor : base) {
    TORCH_CHECK_VALUE(!encoded.is_alias_of(tensor), op, ": expected the changes to be other memory");
  }
  const auto changed = decode_regions(op, in, base, rows, begin, end, false);
  mark_written(base);
  decode_regions(op, in, base, rows, begin, end, true);
  return changed;
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("encode_regions", TORCH_FN(epload::encode_regions));
  m.impl("apply_regions", TORCH_FN(epload::apply_regions));
}
