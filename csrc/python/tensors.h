// Passes tensors from Python to libepload, without torch's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace epload {

// Registers a list of tensors with libepload, which is loaded, and returns the ticket that torch.ops.epload.tensor_list
// takes. Throws TypeError if an item is not a tensor. The tensors are kept alive until the ticket is used. The caller
// holds the GIL.
std::int64_t register_tensors(const pybind11::list& tensors);

// Numbers tensors by class, dtype, device and the object in a slot of their class (see values_in_slot): the number of
// each, and for each number the index of the first tensor that has it. Throws TypeError if an item is not a tensor.
std::pair<std::vector<std::size_t>, std::vector<std::size_t>> tensor_kinds(
    const pybind11::list& tensors, const pybind11::object& slot);

} // namespace epload
