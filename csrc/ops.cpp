// Every schema of torch.ops.epload, and nothing else.
#include "coalesced_bcast.h"
#include "region_copy.h"

#include <ATen/core/grad_mode.h>
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

} // namespace

TORCH_LIBRARY(epload, m) {
  m.def(
      "coalesced_bcast(Tensor(a!)[] tensors, int src, str inter_group, str intra_group, int bucket_bytes, "
      "str algorithm, Stream? stream=None, *, int leader=-1) -> ()");
  m.def("pack(Tensor(a!) bucket, Tensor[] sources, Tensor copies) -> ()");
  m.def("unpack(Tensor bucket, Tensor(a!)[] targets, Tensor copies) -> ()");
}

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("coalesced_bcast", TORCH_FN(coalesced_bcast));
  m.impl("pack", TORCH_FN(pack));
  m.impl("unpack", TORCH_FN(unpack));
}
