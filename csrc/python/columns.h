// Columns of integers as they pass between C++ and Python: the bytes of int64 values, which a tensor shares without a
// copy. A list would have an object for each value.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace epload {

pybind11::bytearray as_column(const std::vector<int64_t>& values);

// Throws ValueError if they are not the bytes of int64 values.
std::vector<int64_t> values_of(const pybind11::bytes& column);

} // namespace epload
