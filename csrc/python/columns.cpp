#include "columns.h"

#include <cstring>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace epload {

py::bytearray as_column(const std::vector<int64_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)};
}

std::vector<int64_t> values_of(const py::bytes& column) {
  const auto raw = static_cast<std::string_view>(column);
  if (raw.size() % sizeof(int64_t) != 0) {
    throw py::value_error("expected the bytes of int64 values, got " + std::to_string(raw.size()) + " bytes");
  }
  std::vector<int64_t> values(raw.size() / sizeof(int64_t));
  if (!values.empty()) {
    std::memcpy(values.data(), raw.data(), raw.size());
  }
  return values;
}

} // namespace epload
