#include "prepared.h"

#include "../tensor_memory.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace epload {

PreparedCopies::PreparedCopies(
    const TensorList& tensors, c10::IntArrayRef which, const at::Tensor& copies, int64_t nbytes)
    : which_(tensors, which), nbytes_(nbytes), regions_([&] {
        const auto selected = tensors.select(which);
        return Regions(*selected, decode_copies(nbytes, *selected, copies));
      }()) {
}

void PreparedCopies::check(const char* op, const at::Tensor& bucket) const {
  TORCH_CHECK_VALUE(
      bucket.is_cpu() && bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous() &&
          bucket.numel() == nbytes_,
      op,
      ": expected the bucket as a contiguous uint8 tensor of ",
      nbytes_,
      " bytes on cpu, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes(),
      " on ",
      bucket.device());
  check_memory(op, bucket, 0);
}

void PreparedCopies::pack(const at::Tensor& bucket, const TensorList& tensors) const {
  check("pack_prepared", bucket);
  regions_.copy(bucket, tensors.memory(which_.of(tensors)), Direction::kPack);
  mark_written(bucket);
}

void PreparedCopies::unpack(const at::Tensor& bucket, const TensorList& tensors) const {
  check("unpack_prepared", bucket);
  const auto which = which_.of(tensors);
  regions_.copy(bucket, tensors.memory(which), Direction::kUnpack);
  tensors.mark_written(which);
}

PreparedReads::PreparedReads(
    const TensorList& tensors,
    c10::IntArrayRef which,
    const at::Tensor& copies,
    c10::IntArrayRef files,
    c10::IntArrayRef offsets,
    int64_t file_count)
    : which_(tensors, which), reads_([&] {
        const auto selected = tensors.select(which);
        return Reads(
            files,
            file_count,
            *selected,
            decode_copies(std::numeric_limits<int64_t>::max(), *selected, copies, offsets));
      }()) {
}

ReadOutcome PreparedReads::run(
    c10::IntArrayRef descriptors, const TensorList& tensors, int64_t threads, bool direct) const {
  const auto which = which_.of(tensors);
  const auto outcome = reads_.run(descriptors, tensors.memory(which), threads, direct);
  tensors.mark_written(which);
  return outcome;
}

PreparedDigests::PreparedDigests(const TensorList& tensors, c10::IntArrayRef which, const at::Tensor& copies)
    : which_(tensors, which) {
  const auto selected = tensors.select(which);
  const auto rows = decode_copies(std::numeric_limits<int64_t>::max(), *selected, copies);
  boxes_.reserve(rows.size());
  for (const auto& row : rows) {
    const auto& tensor = (*selected)[row.tensor];
    if (converts(row, tensor.scalar_type())) {
      converted_.emplace_back(boxes_.size(), row);
      boxes_.emplace_back(row.tensor, MemoryBox());
    } else {
      boxes_.emplace_back(row.tensor, box_in_tensor(tensor, row));
    }
  }
}

std::vector<uint64_t> PreparedDigests::digests(const TensorList& tensors) const {
  constexpr int64_t kAhead = 1024; // bytes of the next box, which the processor does not prefetch by itself
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

void register_prepared_classes() {
  register_tensor_list_classes();
  static const bool registered = [] {
    torch::class_<PreparedCopies>("epload", "PreparedCopies");
    torch::class_<PreparedReads>("epload", "PreparedReads");
    torch::class_<PreparedDigests>("epload", "PreparedDigests");
    return true;
  }();
  (void)registered;
}

namespace {

using List = c10::intrusive_ptr<TensorList>;

c10::intrusive_ptr<PreparedCopies> prepare_copies(
    const List& tensors, at::IntArrayRef which, const at::Tensor& copies, int64_t nbytes) {
  return c10::make_intrusive<PreparedCopies>(*tensors, which, copies, nbytes);
}

void pack_prepared(const at::Tensor& bucket, const List& tensors, const c10::intrusive_ptr<PreparedCopies>& copies) {
  const at::NoGradGuard no_grad;
  copies->pack(bucket, *tensors);
}

void unpack_prepared(const at::Tensor& bucket, const List& tensors, const c10::intrusive_ptr<PreparedCopies>& copies) {
  const at::NoGradGuard no_grad;
  copies->unpack(bucket, *tensors);
}

c10::intrusive_ptr<PreparedReads> prepare_reads(
    const List& tensors,
    at::IntArrayRef which,
    const at::Tensor& copies,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    int64_t file_count) {
  const FileOrigins from("read_regions", files, offsets, origins, copies);
  return c10::make_intrusive<PreparedReads>(*tensors, which, copies, from.files, from.offsets, file_count);
}

std::tuple<int64_t, int64_t, int64_t, int64_t> read_prepared(
    at::IntArrayRef descriptors,
    const List& tensors,
    const c10::intrusive_ptr<PreparedReads>& reads,
    int64_t threads,
    bool direct) {
  const at::NoGradGuard no_grad;
  return reads->run(descriptors, *tensors, threads, direct).as_tuple();
}

c10::intrusive_ptr<PreparedDigests> prepare_digests(
    const List& tensors, at::IntArrayRef which, const at::Tensor& copies) {
  return c10::make_intrusive<PreparedDigests>(*tensors, which, copies);
}

at::Tensor digest_prepared(const List& tensors, const c10::intrusive_ptr<PreparedDigests>& digests) {
  return as_tensor(digests->digests(*tensors));
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_prepared_classes();
  m.impl("prepare_copies", TORCH_FN(epload::prepare_copies));
  m.impl("pack_prepared", TORCH_FN(epload::pack_prepared));
  m.impl("unpack_prepared", TORCH_FN(epload::unpack_prepared));
  m.impl("prepare_reads", TORCH_FN(epload::prepare_reads));
  m.impl("read_prepared", TORCH_FN(epload::read_prepared));
  m.impl("prepare_digests", TORCH_FN(epload::prepare_digests));
  m.impl("digest_prepared", TORCH_FN(epload::digest_prepared));
}
