// Digests of regions, by which a rank proves that its shards are equal to the checkpoint; int64 [rows].
#pragma once

#include <ATen/core/Tensor.h>

namespace epload {

// Of each region of a copy table in its tensor (on CPU): the checksum of its elements in row-major order. If it would
// be converted on its way from the bucket, all NaN count as equal.
at::Tensor digest_tensors(at::TensorList tensors, const at::Tensor& copies);

// What these digests are once a bucket (on CPU) is unpacked. The table has dtype codes of the tensors in column 0.
at::Tensor digest_bucket(const at::Tensor& bucket, const at::Tensor& copies);

} // namespace epload
