#include "containers.h"

#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace epload {
namespace {

constexpr std::size_t kDeepest = 1000; // modules in modules; Python's recursion, in state_dict(), ends there
constexpr std::size_t kAhead = 16;     // items by which a list is prefetched, enough to hide the latency of memory

PyDictObject* as_dict(PyObject* object) {
  if (!PyDict_Check(object)) {
    throw py::type_error("expected dicts");
  }
  return reinterpret_cast<PyDictObject*>(object);
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

// Reads attributes of objects, as Python does. Most are found in the object's own dict, which takes a tenth of the
// time, where its class has none of that name that could come first.
class AttributeReader {
 public:
  explicit AttributeReader(std::vector<py::str> names) : names_(std::move(names)) {
  }

  // Writes one value for each name to `values`.
  void read(PyObject* object, py::object* values) {
    py::object dict;
    if (is_plain(Py_TYPE(object))) {
      dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
      PyErr_Clear();
    }
    for (std::size_t i = 0; i < names_.size(); ++i) {
      PyObject* value = nullptr;
      if (dict && PyDict_CheckExact(dict.ptr()) != 0) {
        value = PyDict_GetItemWithError(dict.ptr(), names_[i].ptr());
      }
      if (value != nullptr) {
        values[i] = py::reinterpret_borrow<py::object>(value);
        continue;
      }
      PyErr_Clear();
      values[i] = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, names_[i].ptr()));
      if (!values[i]) {
        throw py::error_already_set();
      }
    }
  }

 private:
  // Whether a class has no attribute of these names, nor a __getattribute__ of its own.
  bool is_plain(PyTypeObject* type) {
    const auto known = plain_.find(type);
    if (known != plain_.end()) {
      return known->second;
    }
    const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
    const auto base = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    bool plain = object.attr("__getattribute__").is(base.attr("__getattribute__"));
    for (const auto& name : names_) {
      plain = plain && !py::hasattr(object, name);
    }
    classes_.push_back(object); // an address is a class's only as long as that lives
    plain_.emplace(type, plain);
    return plain;
  }

  std::vector<py::str> names_;
  std::vector<py::object> classes_;
  std::unordered_map<PyTypeObject*, bool> plain_;
};

// Appends the addresses of all keys and values, those of each dict after a null, and calls `each` with every value.
template <typename Each>
void walk(const py::list& dicts, std::vector<const void*>& found, const Each& each) {
  const auto count = dicts.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(dicts.ptr());
  found.reserve(3 * count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) {
      __builtin_prefetch(items[i + 2 * kAhead]);
    }
    if (i + kAhead < count) { // by now it is in the cache, and has the address of its keys
      const auto* const keys = reinterpret_cast<const char*>(as_dict(items[i + kAhead])->ma_keys);
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

std::vector<PyObject*> values_in_slot(const py::list& objects, const py::object& slot) {
  const auto* const descriptor = reinterpret_cast<PyMemberDescrObject*>(slot.ptr());
  if (!Py_IS_TYPE(slot.ptr(), &PyMemberDescr_Type) || descriptor->d_member->type != T_OBJECT_EX) {
    throw py::type_error("expected the descriptor of a slot");
  }
  const auto count = objects.size();
  PyObject* const* const items = PySequence_Fast_ITEMS(objects.ptr());
  const auto offset = descriptor->d_member->offset;
  std::vector<PyObject*> found(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      __builtin_prefetch(items[i + kAhead]);
      __builtin_prefetch(reinterpret_cast<const char*>(items[i + kAhead]) + offset);
    }
    if (Py_IS_TYPE(items[i], PyDescr_TYPE(descriptor)) != 0) {
      std::memcpy(&found[i], reinterpret_cast<const char*>(items[i]) + offset, sizeof(found[i]));
    }
  }
  return found;
}

py::bytes dict_addresses(const py::list& dicts) {
  std::vector<const void*> found;
  walk(dicts, found, [](PyObject*) {});
  return as_bytes(found);
}

std::pair<py::bytes, py::list> dict_contents(const py::list& dicts) {
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

py::list weakref_attributes(const py::list& references, const py::str& name) {
  std::vector<py::object> found;
  found.reserve(references.size());
  for (std::size_t i = 0; i < references.size(); ++i) { // a descriptor may be the caller's code, and change the list
    PyObject* const* const items = PySequence_Fast_ITEMS(references.ptr());
    if (i + 2 * kAhead < references.size()) {
      __builtin_prefetch(items[i + 2 * kAhead]);
    }
    if (i + kAhead < references.size() && PyWeakref_Check(items[i + kAhead])) {
      __builtin_prefetch(PyWeakref_GET_OBJECT(items[i + kAhead]), 1);
    }
    if (!PyWeakref_Check(items[i])) {
      throw py::type_error("weakref_attributes: expected weak references");
    }
    const auto object = py::reinterpret_borrow<py::object>(PyWeakref_GET_OBJECT(items[i]));
    found.push_back(py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object.ptr(), name.ptr())));
    if (!found.back()) {
      throw py::error_already_set();
    }
  }
  return as_list(std::move(found));
}

std::pair<py::bytes, std::vector<std::size_t>> slot_addresses(const py::list& objects, const py::object& slot) {
  const auto found = values_in_slot(objects, slot);
  return {as_bytes(found), empty_places(found)};
}

std::pair<py::list, std::vector<std::size_t>> slot_values(const py::list& objects, const py::object& slot) {
  // Made first: making one can run the collector, and with it code that changes what is borrowed here.
  py::list listed(objects.size());
  const auto found = values_in_slot(objects, slot);
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i + kAhead < found.size()) {
      __builtin_prefetch(found[i + kAhead], 1);
    }
    PyObject* const value = found[i] == nullptr ? Py_None : found[i];
    Py_INCREF(value);
    PyList_SET_ITEM(listed.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return {std::move(listed), empty_places(found)};
}

std::vector<std::size_t> nonempty(const py::list& containers) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < containers.size(); ++i) { // __len__ may run code that shrinks the list
    PyObject* const* const items = PySequence_Fast_ITEMS(containers.ptr());
    if (i + kAhead < containers.size()) {
      __builtin_prefetch(items[i + kAhead]);
    }
    const auto container = py::reinterpret_borrow<py::object>(items[i]);
    const auto size = PyDict_Check(container.ptr()) ? PyDict_GET_SIZE(container.ptr()) : PyObject_Size(container.ptr());
    if (size < 0) {
      throw py::error_already_set();
    }
    if (size > 0) {
      places.push_back(i);
    }
  }
  return places;
}

std::pair<py::list, py::list> find_modules(const py::object& root) {
  AttributeReader children({py::str("_modules")});
  const py::str dot(".");
  struct Found {
    py::object prefix, module;
    std::size_t depth;
  };
  std::vector<Found> stack{{py::str(""), root, 0}}, inner;
  std::vector<py::object> prefixes, modules;
  while (!stack.empty()) {
    auto [prefix, module, depth] = std::move(stack.back());
    stack.pop_back();
    inner.clear();
    if (depth > kDeepest) {
      throw py::value_error(
          "expected modules that do not contain one another, got one at the path " +
          prefix.cast<std::string>().substr(0, 200) + "...");
    }
    py::object found;
    children.read(module.ptr(), &found);
    const auto add = [&, &prefix = prefix, depth = depth](PyObject* name, PyObject* child) {
      if (child != Py_None) {
        const auto path = prefix + py::reinterpret_borrow<py::object>(name);
        inner.push_back({path + dot, py::reinterpret_borrow<py::object>(child), depth + 1});
      }
    };
    if (PyDict_CheckExact(found.ptr()) != 0) {
      PyObject *name = nullptr, *child = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(found.ptr(), &at, &name, &child) != 0;) {
        __builtin_prefetch(child, 1);
        add(name, child);
      }
    } else {
      for (const auto item : found.attr("items")()) {
        const py::object name = item[py::int_(0)], child = item[py::int_(1)];
        add(name.ptr(), child.ptr());
      }
    }
    stack.insert(stack.end(), std::make_move_iterator(inner.rbegin()), std::make_move_iterator(inner.rend()));
    prefixes.push_back(std::move(prefix));
    modules.push_back(std::move(module));
  }
  return {as_list(std::move(prefixes)), as_list(std::move(modules))};
}

std::pair<py::list, py::list> named_values(const py::list& prefixes, const py::list& dicts) {
  if (prefixes.size() != dicts.size()) {
    throw py::value_error("named_values: expected as many prefixes as dicts");
  }
  std::vector<py::object> names, values;
  names.reserve(dicts.size());
  values.reserve(dicts.size());
  for (std::size_t i = 0; i < dicts.size(); ++i) { // items() may be the caller's code, and change the lists
    PyObject* const* const items = PySequence_Fast_ITEMS(dicts.ptr());
    if (i + kAhead < dicts.size()) {
      __builtin_prefetch(items[i + kAhead]);
    }
    const py::object prefix = prefixes[i], owned = py::reinterpret_borrow<py::object>(items[i]);
    const auto add = [&](PyObject* name, PyObject* value) {
      if (value != Py_None) {
        names.push_back(py::reinterpret_steal<py::object>(PyUnicode_Concat(prefix.ptr(), name)));
        if (!names.back()) {
          throw py::error_already_set();
        }
        values.push_back(py::reinterpret_borrow<py::object>(value));
      }
    };
    if (PyDict_CheckExact(owned.ptr()) != 0) {
      PyObject *name = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(owned.ptr(), &at, &name, &value) != 0;) {
        add(name, value);
      }
    } else {
      for (const auto item : owned.attr("items")()) {
        const py::object name = item[py::int_(0)], value = item[py::int_(1)];
        add(name.ptr(), value.ptr());
      }
    }
  }
  return {as_list(std::move(names)), as_list(std::move(values))};
}

std::vector<py::list> attributes(const py::list& objects, const std::vector<py::str>& names) {
  AttributeReader reader(names);
  std::vector<std::vector<py::object>> columns(names.size());
  for (auto& column : columns) {
    column.reserve(objects.size());
  }
  std::vector<py::object> found(names.size());
  for (std::size_t i = 0; i < objects.size(); ++i) { // a descriptor may be the caller's code, and change the list
    PyObject* const* const items = PySequence_Fast_ITEMS(objects.ptr());
    if (i + kAhead < objects.size()) {
      __builtin_prefetch(reinterpret_cast<const char*>(items[i + kAhead]) - 32); // where CPython keeps the dict
      __builtin_prefetch(items[i + kAhead], 1);
    }
    const auto object = py::reinterpret_borrow<py::object>(items[i]);
    reader.read(object.ptr(), found.data());
    for (std::size_t column = 0; column < names.size(); ++column) {
      columns[column].push_back(std::move(found[column]));
    }
  }
  std::vector<py::list> lists;
  lists.reserve(columns.size());
  for (auto& column : columns) {
    lists.push_back(as_list(std::move(column)));
  }
  return lists;
}

} // namespace epload
