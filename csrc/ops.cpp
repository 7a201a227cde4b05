// Every schema of torch.ops.epload, and nothing else.
#include "board.h"
#include "checksum.h"
#include "coalesced_bcast.h"
#include "cpu/bound.h"
#include "cpu/file_digests.h"
#include "cpu/handover.h"
#include "cpu/reads.h"
#include "digest.h"
#include "region_copy.h"
#include "relay.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

// Tells autograd that a tensor was written in place, as every in-place op does.
void written(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void coalesced_bcast(
    at::TensorList tensors,
    int64_t src,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t bucket_bytes,
    const std::string& algorithm,
    std::optional<c10::Stream> stream,
    int64_t leader) {
  epload::coalesced_bcast(tensors, src, inter_group, intra_group, bucket_bytes, algorithm, stream, leader);
  written(tensors);
}

void pack(const at::Tensor& bucket, at::TensorList sources, const at::Tensor& copies) {
  const at::NoGradGuard no_grad;
  epload::region_copy(bucket, sources, epload::decode_copies(bucket, sources, copies), epload::Direction::kPack);
  written(bucket);
}

void unpack(const at::Tensor& bucket, at::TensorList targets, const at::Tensor& copies) {
  const at::NoGradGuard no_grad;
  epload::region_copy(bucket, targets, epload::decode_copies(bucket, targets, copies), epload::Direction::kUnpack);
  written(targets);
}

// Of a table: entry i of a column is tensor i's.
at::IntArrayRef column(const char* op, const char* name, const at::Tensor& values) {
  const auto* const numbers = epload::numbers_of(op, name, values, 1);
  return {numbers, static_cast<size_t>(values.numel())};
}

// Where rows of a copy table start that are of tensors of a checkpoint.
struct Origins {
  std::vector<int64_t> files, offsets;

  Origins(
      const char* op,
      const at::Tensor& files_of,
      const at::Tensor& offsets_of,
      const at::Tensor& origins,
      const at::Tensor& copies) {
    const auto file_of = column(op, "files", files_of);
    const auto offset_of = column(op, "offsets", offsets_of);
    const auto* origin = epload::numbers_of(op, "origins", origins, 2);
    TORCH_CHECK_VALUE(
        origins.size(1) == 2 && copies.dim() == 2 && origins.size(0) == copies.size(0) &&
            file_of.size() == offset_of.size(),
        op,
        ": expected origins of shape [n, 2] for n rows, and as many files as offsets, got origins of shape ",
        origins.sizes(),
        " for rows of shape ",
        copies.sizes(),
        ", ",
        file_of.size(),
        " files and ",
        offset_of.size(),
        " offsets");
    files.reserve(origins.size(0));
    offsets.reserve(origins.size(0));
    for (int64_t r = 0; r < origins.size(0); ++r, origin += 2) {
      const auto tensor = origin[0];
      int64_t offset = -1;
      TORCH_CHECK_VALUE(
          tensor >= 0 && tensor < static_cast<int64_t>(offset_of.size()) &&
              !__builtin_add_overflow(offset_of[tensor], origin[1], &offset),
          op,
          ": row ",
          r,
          " starts at byte ",
          origin[1],
          " of tensor ",
          tensor,
          " of ",
          offset_of.size());
      files.push_back(file_of[tensor]);
      offsets.push_back(offset);
    }
  }
};

using Outcome = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Outcome as_tuple(const epload::ReadOutcome& outcome) {
  return {outcome.nbytes, outcome.file, outcome.offset, outcome.error};
}

Outcome read_regions(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    at::TensorList targets,
    const at::Tensor& copies,
    int64_t threads) {
  const Origins from("read_regions", files, offsets, origins, copies);
  for (size_t i = 0; i < targets.size(); ++i) {
    epload::fetch_ahead(targets, i);
    TORCH_CHECK_VALUE(
        targets[i].is_cpu(), "read_regions: expected targets on cpu, tensor ", i, " is on ", targets[i].device());
  }
  const at::NoGradGuard no_grad;
  const auto rows = epload::decode_copies(std::numeric_limits<int64_t>::max(), targets, copies, from.offsets);
  const epload::Reads reads(from.files, static_cast<int64_t>(descriptors.size()), targets, rows);
  const auto outcome = reads.run(descriptors, epload::memory_of(targets, rows), threads);
  written(targets);
  return as_tuple(outcome);
}

using Gathered = c10::intrusive_ptr<epload::Gathered>;
using Layouts = c10::intrusive_ptr<epload::Layouts>;
using BoundCopies = c10::intrusive_ptr<epload::BoundCopies>;
using BoundReads = c10::intrusive_ptr<epload::BoundReads>;

template <typename Word>
at::Tensor as_words(const std::vector<Word>& values) {
  auto result = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), result.template mutable_data_ptr<int64_t>());
  return result;
}

std::tuple<Gathered, bool> gather(int64_t ticket, const std::optional<Layouts>& known) {
  auto gathered = c10::make_intrusive<epload::Gathered>(epload::take_over(ticket), known.value_or(Layouts()));
  return {gathered, gathered->foreign()};
}

Layouts layouts(const Gathered& tensors) {
  TORCH_CHECK_VALUE(!tensors->foreign(), "layouts: expected tensors with memory of their own");
  return tensors->layouts();
}

bool has_layouts(const Gathered& tensors, const Layouts& layouts) {
  return tensors->layouts() == layouts;
}

BoundCopies bind_copies(const Gathered& tensors, at::IntArrayRef which, const at::Tensor& copies, int64_t nbytes) {
  return c10::make_intrusive<epload::BoundCopies>(*tensors, which, copies, nbytes);
}

void unpack_bound(const at::Tensor& bucket, const Gathered& tensors, const BoundCopies& copies) {
  const at::NoGradGuard no_grad;
  copies->unpack(bucket, *tensors);
}

BoundReads bind_reads(
    const Gathered& tensors,
    at::IntArrayRef which,
    const at::Tensor& copies,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    int64_t file_count) {
  const Origins from("read_regions", files, offsets, origins, copies);
  return c10::make_intrusive<epload::BoundReads>(*tensors, which, copies, from.files, from.offsets, file_count);
}

Outcome read_bound(at::IntArrayRef descriptors, const Gathered& tensors, const BoundReads& reads, int64_t threads) {
  const at::NoGradGuard no_grad;
  return as_tuple(reads->run(descriptors, *tensors, threads));
}

using BoundDigests = c10::intrusive_ptr<epload::BoundDigests>;

BoundDigests bind_digests(const Gathered& tensors, at::IntArrayRef which, const at::Tensor& copies) {
  return c10::make_intrusive<epload::BoundDigests>(*tensors, which, copies);
}

at::Tensor digest_bound(const Gathered& tensors, const BoundDigests& digests) {
  return as_words(digests->digests(*tensors));
}

int64_t relay(
    const at::Tensor& bucket,
    const at::Tensor& steps,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t chunk_bytes,
    const std::optional<at::Tensor>& board,
    double seconds) {
  const auto* row = epload::numbers_of("relay", "the steps", steps, 2);
  TORCH_CHECK_VALUE(steps.size(1) == 6, "relay: expected steps of 6 numbers, got ", steps.size(1));
  const at::NoGradGuard no_grad;
  std::vector<epload::RelayStep> rows;
  for (int64_t i = 0; i < steps.size(0); ++i, row += 6) {
    rows.push_back({row[0], row[1], row[2], row[3], row[4], row[5]});
  }
  const auto device = bucket.device().type();
  const auto messages =
      epload::relay(bucket, rows, {inter_group, device}, {intra_group, device}, chunk_bytes, board, seconds);
  written(bucket);
  return messages;
}

int64_t checksum(const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(bytes.is_cpu(), "checksum: expected a tensor on cpu, got ", bytes.device());
  epload::check_memory("checksum", bytes, 0);
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "checksum: expected a contiguous tensor, got strides ", bytes.strides());
  epload::Checksum sum;
  sum.update(bytes.const_data_ptr(), bytes.nbytes());
  return static_cast<int64_t>(sum.value());
}

at::Tensor digest_tensors(at::TensorList tensors, const at::Tensor& copies) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].is_cpu(), "digest_tensors: expected tensors on cpu, tensor ", i, " is on ", tensors[i].device());
  }
  const auto rows = epload::decode_copies(std::numeric_limits<int64_t>::max(), tensors, copies);
  return as_words(epload::digest_tensors(tensors, rows));
}

// What column 0 says where it does not number tensors.
std::vector<at::ScalarType> codes(const char* op, const std::vector<epload::RegionCopy>& rows) {
  std::vector<at::ScalarType> dtypes;
  dtypes.reserve(rows.size());
  for (const auto& row : rows) {
    TORCH_CHECK_VALUE(
        row.tensor >= 0 && row.tensor < static_cast<int64_t>(at::ScalarType::Undefined),
        op,
        ": expected a dtype code in column 0, got ",
        row.tensor);
    dtypes.push_back(static_cast<at::ScalarType>(row.tensor));
  }
  return dtypes;
}

at::Tensor digest_bucket(const at::Tensor& bucket, const at::Tensor& copies) {
  TORCH_CHECK_VALUE(
      bucket.is_cpu() && bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous(),
      "digest_bucket: expected the bucket as a contiguous 1-D uint8 tensor on cpu, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes(),
      " on ",
      bucket.device());
  epload::check_memory("digest_bucket", bucket, 0);
  const at::NoGradGuard no_grad;
  const auto rows = epload::decode_copies(bucket.numel(), copies);
  const auto dtypes = codes("digest_bucket", rows);
  std::vector<uint64_t> digests;
  for (size_t i = 0; i < rows.size(); ++i) {
    digests.push_back(epload::digest_unpacked(bucket, rows[i], dtypes[i]));
  }
  return as_words(digests);
}

std::tuple<at::Tensor, int64_t, int64_t, int64_t, int64_t> digest_files(
    at::IntArrayRef descriptors,
    const at::Tensor& files,
    const at::Tensor& offsets,
    const at::Tensor& origins,
    const at::Tensor& copies,
    int64_t threads) {
  const Origins from("digest_files", files, offsets, origins, copies);
  const at::NoGradGuard no_grad;
  const auto rows = epload::decode_copies(std::numeric_limits<int64_t>::max(), copies, from.offsets);
  const auto found = epload::digest_files(descriptors, from.files, rows, codes("digest_files", rows), threads);
  return std::tuple_cat(std::make_tuple(as_words(found.digests)), as_tuple(found.outcome));
}

} // namespace

TORCH_LIBRARY(epload, m) {
  m.class_<epload::Gathered>("Gathered");
  m.class_<epload::Layouts>("Layouts");
  m.class_<epload::BoundCopies>("BoundCopies");
  m.class_<epload::BoundReads>("BoundReads");
  m.class_<epload::BoundDigests>("BoundDigests");
  m.def(
      "coalesced_bcast(Tensor(a!)[] tensors, int src, str inter_group, str intra_group, int bucket_bytes, "
      "str algorithm, Stream? stream=None, *, int leader=-1) -> ()");
  m.def("pack(Tensor(a!) bucket, Tensor[] sources, Tensor copies) -> ()");
  m.def("unpack(Tensor bucket, Tensor(a!)[] targets, Tensor copies) -> ()");
  m.def(
      "read_regions(int[] descriptors, Tensor files, Tensor offsets, Tensor origins, Tensor(a!)[] targets, "
      "Tensor copies, int threads) -> (int, int, int, int)");
  m.def(
      "gather(int ticket, __torch__.torch.classes.epload.Layouts? known=None) -> "
      "(__torch__.torch.classes.epload.Gathered, bool)");
  m.def("layouts(__torch__.torch.classes.epload.Gathered tensors) -> __torch__.torch.classes.epload.Layouts");
  m.def(
      "has_layouts(__torch__.torch.classes.epload.Gathered tensors, __torch__.torch.classes.epload.Layouts layouts) -> "
      "bool");
  m.def(
      "bind_copies(__torch__.torch.classes.epload.Gathered tensors, int[] which, Tensor copies, int nbytes) -> "
      "__torch__.torch.classes.epload.BoundCopies");
  m.def(
      "unpack_bound(Tensor bucket, __torch__.torch.classes.epload.Gathered tensors, "
      "__torch__.torch.classes.epload.BoundCopies copies) -> ()");
  m.def(
      "bind_reads(__torch__.torch.classes.epload.Gathered tensors, int[] which, Tensor copies, Tensor files, "
      "Tensor offsets, Tensor origins, int file_count) -> __torch__.torch.classes.epload.BoundReads");
  m.def(
      "read_bound(int[] descriptors, __torch__.torch.classes.epload.Gathered tensors, "
      "__torch__.torch.classes.epload.BoundReads reads, int threads) -> (int, int, int, int)");
  m.def(
      "bind_digests(__torch__.torch.classes.epload.Gathered tensors, int[] which, Tensor copies) -> "
      "__torch__.torch.classes.epload.BoundDigests");
  m.def(
      "digest_bound(__torch__.torch.classes.epload.Gathered tensors, "
      "__torch__.torch.classes.epload.BoundDigests digests) -> Tensor");
  m.def(
      "relay(Tensor(a!) bucket, Tensor steps, str inter_group, str intra_group, int chunk_bytes, Tensor? board=None, "
      "float seconds=0) -> int");
  m.def("checksum(Tensor bytes) -> int");
  m.def("digest_tensors(Tensor[] tensors, Tensor copies) -> Tensor");
  m.def("digest_bucket(Tensor bucket, Tensor copies) -> Tensor");
  m.def(
      "digest_files(int[] descriptors, Tensor files, Tensor offsets, Tensor origins, Tensor copies, int threads) -> "
      "(Tensor, int, int, int, int)");
  m.def("board_post(Tensor(a!) board, int slot, int value) -> ()");
  m.def("board_wait(Tensor board, int[] slots, int value, float seconds) -> int");
}

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("coalesced_bcast", TORCH_FN(coalesced_bcast));
  m.impl("pack", TORCH_FN(pack));
  m.impl("unpack", TORCH_FN(unpack));
  m.impl("read_regions", TORCH_FN(read_regions));
  m.impl("gather", TORCH_FN(gather));
  m.impl("layouts", TORCH_FN(layouts));
  m.impl("has_layouts", TORCH_FN(has_layouts));
  m.impl("bind_copies", TORCH_FN(bind_copies));
  m.impl("unpack_bound", TORCH_FN(unpack_bound));
  m.impl("bind_reads", TORCH_FN(bind_reads));
  m.impl("read_bound", TORCH_FN(read_bound));
  m.impl("bind_digests", TORCH_FN(bind_digests));
  m.impl("digest_bound", TORCH_FN(digest_bound));
  m.impl("relay", TORCH_FN(relay));
  m.impl("checksum", TORCH_FN(checksum));
  m.impl("digest_tensors", TORCH_FN(digest_tensors));
  m.impl("digest_bucket", TORCH_FN(digest_bucket));
  m.impl("digest_files", TORCH_FN(digest_files));
  m.impl("board_post", TORCH_FN(epload::board_post));
  m.impl("board_wait", TORCH_FN(epload::board_wait));
}
