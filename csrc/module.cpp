// The Python module epload._C: what an op cannot take. Links no torch, so it can be imported to learn which torch the
// native library was built for before that library is loaded.
#include "bucket_plan.h"
#include "containers.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Columns = std::array<std::vector<int64_t>, 5>;

// Slots as columns: tensor, tensor_offset, bucket, bucket_offset, nbytes.
std::pair<Columns, std::vector<int64_t>> plan_buckets(
    const std::vector<std::array<int64_t, 3>>& extents, int64_t capacity, int64_t alignment, int64_t header) {
  std::vector<epload::TensorExtent> tensors;
  tensors.reserve(extents.size());
  for (const auto& [nbytes, granule, slab] : extents) {
    tensors.push_back({nbytes, granule, slab});
  }
  auto plan = epload::plan_buckets(tensors, capacity, alignment, header);
  Columns columns;
  for (const auto& slot : plan.slots) {
    columns[0].push_back(slot.tensor);
    columns[1].push_back(slot.tensor_offset);
    columns[2].push_back(slot.bucket);
    columns[3].push_back(slot.bucket_offset);
    columns[4].push_back(slot.nbytes);
  }
  return {std::move(columns), std::move(plan.bucket_nbytes)};
}

std::tuple<int64_t, int64_t, int64_t> extent_of(const std::vector<int64_t>& shape, int64_t itemsize, int64_t room) {
  const auto e = epload::extent_of(shape.data(), static_cast<int64_t>(shape.size()), itemsize, room);
  return {e.nbytes, e.granule, e.slab};
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = EPLOAD_TORCH_VERSION;
  m.attr("version") = EPLOAD_VERSION;
  m.attr("compiler") = EPLOAD_COMPILER;
  m.attr("cuda_architectures") = EPLOAD_CUDA_ARCHITECTURES; // comma-separated; empty in a build without CUDA
  m.attr("torch_npu_version") = EPLOAD_TORCH_NPU_VERSION;   // empty in a build without the Ascend part
  m.def(
      "plan_buckets", &plan_buckets, py::arg("extents"), py::arg("capacity"), py::arg("alignment"), py::arg("header"));
  m.def("addresses", &epload::addresses, py::arg("dicts"));
  m.def("contents", &epload::contents, py::arg("dicts"));
  m.def("attributes", &epload::attributes, py::arg("references"), py::arg("name"));
  m.def("held", &epload::held, py::arg("objects"), py::arg("slot"));
  m.def("values", &epload::values, py::arg("objects"), py::arg("slot"));
  m.def("hand_over", &epload::hand_over, py::arg("tensors"));
  m.def("all_empty", &epload::all_empty, py::arg("containers"));
  m.def("extent_of", &extent_of, py::arg("shape"), py::arg("itemsize"), py::arg("room"));
}
