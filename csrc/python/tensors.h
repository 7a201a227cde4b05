// Passes tensors from Python to libepload, without torch's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace epload {

// Registers a list of tensors with libepload, which is loaded, and returns the ticket that torch.ops.epload.tensor_list
// takes. Throws TypeError if an item is not a tensor. The tensors are kept alive until the ticket is used. The caller
// holds the GIL.
std::int64_t register_tensors(const pybind11::list& tensors);

} // namespace epload
