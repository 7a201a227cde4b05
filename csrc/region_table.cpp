#include "region_table.h"

#include "tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <utility>

namespace epload {
namespace {

constexpr int64_t kHeaderBytes = 64; // at a bucket's start, of which a guard knows most

void check_guard(const Guard& guard, const at::Tensor& bucket) {
  TORCH_CHECK_VALUE(
      bucket.numel() >= kHeaderBytes,
      "unpack_table: a guard compares ",
      kHeaderBytes,
      " bytes, and the bucket has ",
      bucket.numel());
  TORCH_CHECK_VALUE(
      guard.expected.is_cpu() && guard.expected.scalar_type() == at::kByte && guard.expected.is_contiguous() &&
          guard.expected.numel() == kHeaderBytes,
      "unpack_table: expected `expected` as a contiguous uint8 tensor of ",
      kHeaderBytes,
      " bytes on cpu, got ",
      guard.expected.scalar_type(),
      " of shape ",
      guard.expected.sizes(),
      " on ",
      guard.expected.device());
  TORCH_CHECK_VALUE(
      guard.stopped.device() == bucket.device() && guard.stopped.scalar_type() == at::kInt &&
          guard.stopped.numel() == 1,
      "unpack_table: expected `stopped` as one int32 on ",
      bucket.device(),
      ", got ",
      guard.stopped.scalar_type(),
      " of shape ",
      guard.stopped.sizes(),
      " on ",
      guard.stopped.device());
  TORCH_CHECK_VALUE(
      guard.flag.is_cpu() && guard.flag.scalar_type() == at::kInt && guard.flag.numel() == 1 && guard.flag.is_pinned(),
      "unpack_table: expected `flag` as one int32 in pinned memory, got ",
      guard.flag.scalar_type(),
      " of shape ",
      guard.flag.sizes(),
      " on ",
      guard.flag.device());
  check_memory("unpack_table's guard", guard.expected, 0);
  check_memory("unpack_table's guard", guard.stopped, 1);
  check_memory("unpack_table's guard", guard.flag, 2);
}

} // namespace

RegionTable::RegionTable(const at::Tensor& copies) : copies_(decode_rows(copies)) {
}

RegionTable::Key RegionTable::key_of(const at::Tensor& bucket, at::TensorList targets) {
  // The stream too: memory that is filled, used and freed on one stream is never another one's too early.
  const auto device = bucket.device();
  Key key{
      static_cast<int64_t>(device.type()),
      device.index(),
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).id(),
      reinterpret_cast<int64_t>(bucket.data_ptr()),
      bucket.numel()};
  key.reserve(key.size() + 8 * targets.size());
  for (const auto& target : targets) {
    key.push_back(reinterpret_cast<int64_t>(target.data_ptr()));
    key.push_back(static_cast<int64_t>(target.scalar_type()));
    key.push_back(target.dim());
    key.insert(key.end(), target.sizes().begin(), target.sizes().end());
    key.insert(key.end(), target.strides().begin(), target.strides().end());
  }
  return key;
}

std::shared_ptr<const ReadyCopies> RegionTable::ready(const at::Tensor& bucket, at::TensorList targets) {
  const auto& kernels = region_kernels(bucket.device().type());
  if (kernels.ready == nullptr) {
    return nullptr;
  }
  auto key = key_of(bucket, targets);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kept_.copies && kept_.key == key) {
    return kept_.copies;
  }
  check_rows(copies_, bucket.numel(), targets);
  auto copies = kernels.ready(bucket, targets, copies_);
  if (copies) {
    kept_ = {std::move(key), copies};
  }
  return copies;
}

void RegionTable::unpack(const at::Tensor& bucket, at::TensorList targets, const Guard* guard) {
  check_sides(bucket, targets);
  const auto copies = ready(bucket, targets);
  if (guard != nullptr) {
    check_guard(*guard, bucket);
    TORCH_CHECK_VALUE(
        copies && copies->guardable(),
        "unpack_table: a guard is for regions that kernels copy, and ",
        copies ? "a region of the table is copied by torch" : "there are none for ",
        copies ? "" : c10::str(bucket.device()));
  }
  if (copies) {
    copies->run(bucket, targets, guard);
  } else {
    check_rows(copies_, bucket.numel(), targets);
    region_copy(bucket, targets, copies_, Direction::kUnpack);
  }
  mark_written(targets);
}

bool RegionTable::can_guard(const at::Tensor& bucket, at::TensorList targets) {
  check_sides(bucket, targets);
  const auto copies = ready(bucket, targets);
  return copies && copies->guardable();
}

void register_region_table_class() {
  static const auto registered = torch::class_<RegionTable>("epload", "RegionTable");
  (void)registered;
}

namespace {

using Table = c10::intrusive_ptr<RegionTable>;

Table region_table(const at::Tensor& copies) {
  return c10::make_intrusive<RegionTable>(copies);
}

void unpack_table(
    const at::Tensor& bucket,
    at::TensorList targets,
    const Table& table,
    const std::optional<at::Tensor>& expected,
    const std::optional<at::Tensor>& stopped,
    const std::optional<at::Tensor>& flag) {
  const at::NoGradGuard no_grad;
  if (!expected && !stopped && !flag) {
    table->unpack(bucket, targets, nullptr);
    return;
  }
  TORCH_CHECK_VALUE(
      expected && stopped && flag, "unpack_table: a guard is all three of `expected`, `stopped` and `flag`");
  const Guard guard{*expected, *stopped, *flag};
  table->unpack(bucket, targets, &guard);
  mark_written({guard.stopped, guard.flag});
}

bool can_guard_table(const at::Tensor& bucket, at::TensorList targets, const Table& table) {
  return table->can_guard(bucket, targets);
}

bool can_guard(c10::Device device) {
  const auto usable = region_kernels(device.type()).usable;
  return usable != nullptr && usable(device);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_region_table_class();
  m.impl("region_table", TORCH_FN(epload::region_table));
  m.impl("unpack_table", TORCH_FN(epload::unpack_table));
  m.impl("can_guard_table", TORCH_FN(epload::can_guard_table));
  m.impl("can_guard", TORCH_FN(epload::can_guard));
}
