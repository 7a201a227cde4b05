#include "tensors.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace epload {
namespace {

constexpr std::size_t kAhead = 16; // items by which the list is prefetched

// Disables __torch_function__ of tensor classes for its lifetime.
class NoTorchFunction {
 public:
  explicit NoTorchFunction(const py::module_& torch) : guard_(torch.attr("DisableTorchFunction")()) {
    guard_.attr("__enter__")();
  }
  ~NoTorchFunction() {
    try {
      guard_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("epload._C.register_tensors");
    }
  }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;

 private:
  py::object guard_;
};

using RegisterTensors = std::int64_t (*)(void* const*, std::uint64_t, char*, std::uint64_t);

// The function of libepload (csrc/cpu/tensor_list.h), which is in the same folder as this library and already loaded.
RegisterTensors find_function() {
  static const char anchor = 0;
  Dl_info self{};
  if (dladdr(&anchor, &self) == 0) {
    throw std::runtime_error("epload: cannot find its own library");
  }
  const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libepload.so";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : dlsym(library, "epload_register_tensors");
  if (found == nullptr) {
    throw std::runtime_error("epload: " + path.string() + " is not loaded or of another build; rebuild epload");
  }
  return reinterpret_cast<RegisterTensors>(found);
}

} // namespace

std::int64_t register_tensors(const py::list& tensors) {
  static const auto register_with_library = find_function();
  const auto torch = py::module_::import("torch._C");
  const py::object getter = torch.attr("TensorBase").attr("_cdata");
  if (!Py_IS_TYPE(getter.ptr(), &PyGetSetDescr_Type)) {
    throw py::type_error("register_tensors: torch.Tensor has no _cdata of its own");
  }
  const auto* const get = reinterpret_cast<PyGetSetDescrObject*>(getter.ptr())->d_getset;
  auto* const type = PyDescr_TYPE(getter.ptr());
  const NoTorchFunction guard(torch); // else a class that unwraps its tensors returns the address of a temporary one
  const auto count = tensors.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(tensors.ptr());
  std::vector<void*> found;
  found.reserve(count);
  for (std::size_t i = 0; i < count; ++i) { // runs no Python code, so that nothing changes the list
    if (i + kAhead < count) {
      __builtin_prefetch(items[i + kAhead]);
    }
    if (PyObject_TypeCheck(items[i], type) == 0) {
      throw py::type_error(
          "register_tensors: expected a list of tensors, item " + std::to_string(i) + " is of type " +
          Py_TYPE(items[i])->tp_name);
    }
    const auto address = py::reinterpret_steal<py::object>(get->get(items[i], get->closure));
    found.push_back(address ? PyLong_AsVoidPtr(address.ptr()) : nullptr);
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  }
  std::array<char, 1024> message{};
  const auto ticket = register_with_library(found.data(), found.size(), message.data(), message.size());
  if (ticket == 0) {
    throw std::runtime_error(std::string("epload: ") + message.data());
  }
  return ticket;
}

} // namespace epload
