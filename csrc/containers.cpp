#include "containers.h"

#include <dlfcn.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace epload {

namespace {

// Of the list's items, so far that memory answers in time.
constexpr std::size_t AHEAD = 16;

PyDictObject* as_dict(PyObject* object) {
  if (!PyDict_Check(object)) {
    throw py::type_error("expected dicts");
  }
  return reinterpret_cast<PyDictObject*>(object);
}

// What each object has in the slot, borrowed; null for objects of other classes, also of derived ones.
std::vector<PyObject*> in_slot(const py::list& objects, const py::object& slot) {
  const auto* const descriptor = reinterpret_cast<PyMemberDescrObject*>(slot.ptr());
  if (!Py_IS_TYPE(slot.ptr(), &PyMemberDescr_Type) || descriptor->d_member->type != T_OBJECT_EX) {
    throw py::type_error("in_slot: expected the descriptor of a slot");
  }
  const auto count = objects.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(objects.ptr());
  const auto offset = descriptor->d_member->offset;
  std::vector<PyObject*> found(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + AHEAD < count) {
      __builtin_prefetch(items[i + AHEAD]);
      __builtin_prefetch(reinterpret_cast<const char*>(items[i + AHEAD]) + offset);
    }
    if (Py_IS_TYPE(items[i], PyDescr_TYPE(descriptor)) != 0) {
      std::memcpy(&found[i], reinterpret_cast<const char*>(items[i]) + offset, sizeof(found[i]));
    }
  }
  return found;
}

std::vector<std::size_t> empty_places(const std::vector<PyObject*>& found) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == nullptr) {
      places.push_back(i);
    }
  }
  return places;
}

template <typename Address>
py::bytes as_bytes(const std::vector<Address>& found) {
  return {reinterpret_cast<const char*>(found.data()), found.size() * sizeof(found[0])};
}

py::list as_list(std::vector<py::object> values) {
  py::list listed(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyList_SET_ITEM(listed.ptr(), static_cast<Py_ssize_t>(i), values[i].release().ptr());
  }
  return listed;
}

// Adds the addresses of all keys and values, null before those of each dict, and passes every value to `each`.
template <typename Each>
void walk(const py::list& dicts, std::vector<const void*>& found, const Each& each) {
  const auto count = dicts.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(dicts.ptr());
  found.reserve(3 * count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + 2 * AHEAD < count) {
      __builtin_prefetch(items[i + 2 * AHEAD]);
    }
    if (i + AHEAD < count) { // by now it is here, and says where its keys are
      const auto* const keys = reinterpret_cast<const char*>(as_dict(items[i + AHEAD])->ma_keys);
      __builtin_prefetch(keys);
      __builtin_prefetch(keys + 64);
    }
    found.push_back(nullptr);
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(reinterpret_cast<PyObject*>(as_dict(items[i])), &at, &key, &value) != 0;) {
      found.push_back(key);
      found.push_back(value);
      each(value);
    }
  }
}

} // namespace

py::bytes addresses(const py::list& dicts) {
  std::vector<const void*> found;
  walk(dicts, found, [](PyObject*) {});
  return as_bytes(found);
}

std::pair<py::bytes, py::list> contents(const py::list& dicts) {
  std::vector<const void*> found;
  std::vector<PyObject*> borrowed;
  borrowed.reserve(dicts.size());
  walk(dicts, found, [&borrowed](PyObject* value) {
    __builtin_prefetch(value, 1);
    borrowed.push_back(value);
  });
  // Making a list can run the collector, and with it code that changes the dicts.
  std::vector<py::object> values;
  values.reserve(borrowed.size());
  for (PyObject* const value : borrowed) {
    values.push_back(py::reinterpret_borrow<py::object>(value));
  }
  return {as_bytes(found), as_list(std::move(values))};
}

py::list attributes(const py::list& references, const py::str& name) {
  std::vector<py::object> found;
  found.reserve(references.size());
  for (std::size_t i = 0; i < references.size(); ++i) { // a descriptor may be the caller's code, and change the list
    PyObject* const* const items = PySequence_Fast_ITEMS(references.ptr());
    if (i + 2 * AHEAD < references.size()) {
      __builtin_prefetch(items[i + 2 * AHEAD]);
    }
    if (i + AHEAD < references.size() && PyWeakref_Check(items[i + AHEAD])) {
      __builtin_prefetch(PyWeakref_GET_OBJECT(items[i + AHEAD]), 1);
    }
    if (!PyWeakref_Check(items[i])) {
      throw py::type_error("attributes: expected weak references");
    }
    const auto object = py::reinterpret_borrow<py::object>(PyWeakref_GET_OBJECT(items[i]));
    found.push_back(py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object.ptr(), name.ptr())));
    if (!found.back()) {
      throw py::error_already_set();
    }
  }
  return as_list(std::move(found));
}

std::pair<py::bytes, std::vector<std::size_t>> held(const py::list& objects, const py::object& slot) {
  const auto found = in_slot(objects, slot);
  return {as_bytes(found), empty_places(found)};
}

std::pair<py::list, std::vector<std::size_t>> values(const py::list& objects, const py::object& slot) {
  // Made first: making one can run the collector, and with it code that changes what is borrowed here.
  py::list listed(objects.size());
  const auto found = in_slot(objects, slot);
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i + AHEAD < found.size()) {
      __builtin_prefetch(found[i + AHEAD], 1);
    }
    PyObject* const value = found[i] == nullptr ? Py_None : found[i];
    Py_INCREF(value);
    PyList_SET_ITEM(listed.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return {std::move(listed), empty_places(found)};
}

namespace {

// While it lives, classes of tensors do not take part in torch's functions.
class NoTorchFunction {
 public:
  explicit NoTorchFunction(const py::module_& torch) : guard_(torch.attr("DisableTorchFunction")()) {
    guard_.attr("__enter__")();
  }
  ~NoTorchFunction() {
    try {
      guard_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("epload._C.hand_over");
    }
  }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;

 private:
  py::object guard_;
};

using HandOver = std::int64_t (*)(void* const*, std::uint64_t, char*, std::uint64_t);

// libepload's (see csrc/cpu/handover.h). It lies beside this library, and is open already.
HandOver hand_over_function() {
  static const char anchor = 0;
  Dl_info self{};
  if (dladdr(&anchor, &self) == 0) {
    throw std::runtime_error("epload: cannot find its own library");
  }
  const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libepload.so";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : dlsym(library, "epload_hand_over");
  if (found == nullptr) {
    throw std::runtime_error("epload: " + path.string() + " is not loaded or of another build; rebuild epload");
  }
  return reinterpret_cast<HandOver>(found);
}

} // namespace

std::int64_t hand_over(const py::list& tensors) {
  static const auto keep = hand_over_function();
  const auto torch = py::module_::import("torch._C");
  const py::object getter = torch.attr("TensorBase").attr("_cdata");
  if (!Py_IS_TYPE(getter.ptr(), &PyGetSetDescr_Type)) {
    throw py::type_error("hand_over: torch.Tensor has no _cdata of its own");
  }
  const auto* const get = reinterpret_cast<PyGetSetDescrObject*>(getter.ptr())->d_getset;
  auto* const type = PyDescr_TYPE(getter.ptr());
  const NoTorchFunction guard(torch); // else a class that unwraps its tensors says where a temporary one was
  const auto count = tensors.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(tensors.ptr());
  std::vector<void*> found;
  found.reserve(count);
  for (std::size_t i = 0; i < count; ++i) { // runs no code of Python's, so that nothing changes the list
    if (i + AHEAD < count) {
      __builtin_prefetch(items[i + AHEAD]);
    }
    if (PyObject_TypeCheck(items[i], type) == 0) {
      throw py::type_error(
          "hand_over: expected a list of tensors, item " + std::to_string(i) + " is of type " +
          Py_TYPE(items[i])->tp_name);
    }
    const auto address = py::reinterpret_steal<py::object>(get->get(items[i], get->closure));
    found.push_back(address ? PyLong_AsVoidPtr(address.ptr()) : nullptr);
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  }
  std::array<char, 1024> message{};
  const auto ticket = keep(found.data(), found.size(), message.data(), message.size());
  if (ticket == 0) {
    throw std::runtime_error(std::string("epload: ") + message.data());
  }
  return ticket;
}

bool all_empty(const py::list& containers) {
  for (std::size_t i = 0; i < containers.size(); ++i) { // __len__ may run code that shrinks the list
    PyObject* const* const items = PySequence_Fast_ITEMS(containers.ptr());
    if (i + AHEAD < containers.size()) {
      __builtin_prefetch(items[i + AHEAD]);
    }
    const auto container = py::reinterpret_borrow<py::object>(items[i]);
    const auto size = PyDict_Check(container.ptr()) ? PyDict_GET_SIZE(container.ptr()) : PyObject_Size(container.ptr());
    if (size < 0) {
      throw py::error_already_set();
    }
    if (size > 0) {
      return false;
    }
  }
  return true;
}

} // namespace epload
