// Changes between two buffers: checked and applied. The format is in docs/sync.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace epload {

// The units that encoded changes would change in a buffer of so many bytes. ValueError if they are damaged, of another
// format, or of a buffer of another size.
int64_t check_changes(const at::Tensor& encoded, int64_t nbytes);

// Applies them, after all are checked.
int64_t apply_changes(const at::Tensor& encoded, at::Tensor& base);

} // namespace epload
