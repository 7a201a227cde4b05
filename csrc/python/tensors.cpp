#include "tensors.h"

#include "containers.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
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
using TensorKinds = std::int64_t (*)(void* const*, std::uint64_t, std::int64_t*, char*, std::uint64_t);

// A function of libepload (csrc/cpu/tensor_list.h), which is in the same folder as this library and already loaded.
template <typename Function>
Function find_function(const char* name) {
  static const char anchor = 0;
  Dl_info self{};
  if (dladdr(&anchor, &self) == 0) {
    throw std::runtime_error("epload: cannot find its own library");
  }
  const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libepload.so";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) {
    throw std::runtime_error("epload: " + path.string() + " is not loaded or of another build; rebuild epload");
  }
  return reinterpret_cast<Function>(found);
}

// The addresses of the tensors' TensorImpls. Runs no Python code, so that nothing changes the list.
std::vector<void*> addresses(const char* caller, const py::list& tensors) {
  const auto torch = py::module_::import("torch._C");
  const py::object getter = torch.attr("TensorBase").attr("_cdata");
  if (!Py_IS_TYPE(getter.ptr(), &PyGetSetDescr_Type)) {
    throw py::type_error(std::string(caller) + ": torch.Tensor has no _cdata of its own");
  }
  const auto* const get = reinterpret_cast<PyGetSetDescrObject*>(getter.ptr())->d_getset;
  auto* const type = PyDescr_TYPE(getter.ptr());
  const NoTorchFunction guard(torch); // else a class that unwraps its tensors returns the address of a temporary one
  const auto count = tensors.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(tensors.ptr());
  std::vector<void*> found;
  found.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      __builtin_prefetch(items[i + kAhead]);
    }
    if (PyObject_TypeCheck(items[i], type) == 0) {
      throw py::type_error(
          std::string(caller) + ": expected a list of tensors, item " + std::to_string(i) + " is of type " +
          Py_TYPE(items[i])->tp_name);
    }
    const auto address = py::reinterpret_steal<py::object>(get->get(items[i], get->closure));
    found.push_back(address ? PyLong_AsVoidPtr(address.ptr()) : nullptr);
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  }
  return found;
}

} // namespace

std::int64_t register_tensors(const py::list& tensors) {
  static const auto register_with_library = find_function<RegisterTensors>("epload_register_tensors");
  const auto found = addresses("register_tensors", tensors);
  std::array<char, 1024> message{};
  const auto ticket = register_with_library(found.data(), found.size(), message.data(), message.size());
  if (ticket == 0) {
    throw std::runtime_error(std::string("epload: ") + message.data());
  }
  return ticket;
}

std::pair<std::vector<std::size_t>, std::vector<std::size_t>> tensor_kinds(
    const py::list& tensors, const py::object& slot) {
  static const auto kinds_of = find_function<TensorKinds>("epload_tensor_kinds");
  const auto found = addresses("tensor_kinds", tensors);
  const auto in_slot = values_in_slot(tensors, slot);
  std::vector<PyTypeObject*> types;
  types.reserve(found.size());
  for (const auto tensor : tensors) {
    types.push_back(Py_TYPE(tensor.ptr()));
  }
  std::vector<std::int64_t> kinds(found.size());
  std::array<char, 1024> message{};
  if (kinds_of(found.data(), found.size(), kinds.data(), message.data(), message.size()) == 0) {
    throw std::runtime_error(std::string("epload: ") + message.data());
  }
  using Kind = std::tuple<PyTypeObject*, PyObject*, std::int64_t>;
  std::map<Kind, std::size_t> known;
  std::vector<std::size_t> numbers, firsts;
  numbers.reserve(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const Kind kind{types[i], in_slot[i], kinds[i]};
    const auto [at, fresh] = known.try_emplace(kind, firsts.size());
    if (fresh) {
      firsts.push_back(i);
    }
    numbers.push_back(at->second);
  }
  return {std::move(numbers), std::move(firsts)};
}

} // namespace epload
