// The Python module epload._C: functions of integers and Python objects, which need no tensors. It links no torch, so
// that it can be imported before the native library is loaded, to find out for which torch that was built.
#include "bucket_plan.h"
#include "pickles.h"
#include "schedule.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Columns of integers pass between C++ and Python as the bytes of int64 values, which a tensor shares without a copy. A
// list would have an object for each value.
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

// Slots as columns: tensor, tensor_offset, bucket, bucket_offset, nbytes; and the bytes of each bucket. `extents` are
// those of kinds of tensors of which the column `kind_of` says which each has.
std::pair<std::vector<py::bytearray>, std::vector<int64_t>> plan_buckets(
    const std::vector<std::array<int64_t, 3>>& extents,
    int64_t capacity,
    int64_t alignment,
    int64_t header,
    const py::bytes& kind_of) {
  std::vector<epload::TensorExtent> tensors;
  for (const auto kind : values_of(kind_of)) {
    const auto& [nbytes, granule, slab] = extents.at(static_cast<std::size_t>(kind));
    tensors.push_back({nbytes, granule, slab});
  }
  auto plan = epload::plan_buckets(tensors, capacity, alignment, header);
  std::array<std::vector<int64_t>, 5> columns;
  for (auto& column : columns) {
    column.reserve(plan.slots.size());
  }
  for (const auto& slot : plan.slots) {
    columns[0].push_back(slot.tensor);
    columns[1].push_back(slot.tensor_offset);
    columns[2].push_back(slot.bucket);
    columns[3].push_back(slot.bucket_offset);
    columns[4].push_back(slot.nbytes);
  }
  std::vector<py::bytearray> encoded;
  std::transform(columns.begin(), columns.end(), std::back_inserter(encoded), as_column);
  return {std::move(encoded), std::move(plan.bucket_nbytes)};
}

std::tuple<int64_t, int64_t, int64_t> extent_of(const std::vector<int64_t>& shape, int64_t itemsize, int64_t room) {
  const auto e = epload::extent_of(shape.data(), static_cast<int64_t>(shape.size()), itemsize, room);
  return {e.nbytes, e.granule, e.slab};
}

using Step = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

// `buckets`: node that reads it, begin, end.
std::vector<Step> wave_steps(
    const epload::Nodes& nodes,
    int64_t src,
    int64_t rank,
    const std::string& algorithm,
    bool shared,
    bool crosses,
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& buckets,
    int64_t alignment) {
  std::vector<epload::WaveBucket> wave;
  for (const auto& [node, begin, end] : buckets) {
    wave.push_back({node, begin, end});
  }
  std::vector<Step> steps;
  const epload::WaveOptions options{epload::algorithm_of(algorithm), shared, crosses};
  for (const auto& s : epload::wave_steps(nodes, src, rank, options, wave, alignment)) {
    steps.emplace_back(s.begin, s.end, s.from_inter, s.from_intra, s.to_inter, s.to_intra);
  }
  return steps;
}

std::size_t check_pickle(
    const py::bytes& pickle, std::size_t begin, const std::optional<std::unordered_set<std::string>>& allowed) {
  const auto raw = static_cast<std::string_view>(pickle);
  const py::gil_scoped_release release;
  return epload::check_pickle(raw, begin, allowed ? &*allowed : nullptr);
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = EPLOAD_TORCH_VERSION;
  m.attr("version") = EPLOAD_VERSION;
  m.attr("compiler") = EPLOAD_COMPILER;
  m.attr("cuda_architectures") = EPLOAD_CUDA_ARCHITECTURES; // comma-separated; empty in a build without CUDA
  m.attr("torch_npu_version") = EPLOAD_TORCH_NPU_VERSION;   // empty in a build without the Ascend part
  m.attr("OP_ALIGNMENT") = epload::kOpAlignment;
  m.def("plan_buckets", &plan_buckets); // extents, capacity, alignment, header, kind_of
  m.def("extent_of", &extent_of);       // shape, itemsize, room
  m.def("leaders", &epload::leaders);   // nodes, src
  m.def("rails", &epload::rails);       // nodes
  m.def("wave_steps", &wave_steps);     // nodes, src, rank, algorithm, shared, crosses, buckets, alignment
  m.def("check_pickle", &check_pickle); // pickle, begin, allowed
}
