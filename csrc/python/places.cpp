#include "places.h"

#include "columns.h"

#include <string>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;

namespace epload {
namespace {

// The items of a tuple, which keeps them alive.
PyObject* const* items_of(PyObject* object, Py_ssize_t* count) {
  if (!PyTuple_Check(object)) {
    throw py::type_error(std::string("select_places: expected tuples, got ") + Py_TYPE(object)->tp_name);
  }
  *count = PyTuple_GET_SIZE(object);
  return PySequence_Fast_ITEMS(object);
}

class Targets {
 public:
  explicit Targets(const py::dict& target_of) : target_of_(target_of) {
  }

  // `name` lives as long as this. Experts that are stacked have one name, one after the other.
  int64_t find(PyObject* name) {
    if (name == last_name_) {
      return last_;
    }
    if (!PyUnicode_Check(name)) {
      throw py::type_error(std::string("select_places: expected names to be str, got ") + Py_TYPE(name)->tp_name);
    }
    const auto number = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(target_of_.ptr(), name));
    if (!number) {
      if (PyErr_Occurred() == nullptr) {
        PyErr_SetObject(PyExc_KeyError, name);
      }
      throw py::error_already_set();
    }
    const auto target = PyLong_AsLongLong(number.ptr());
    if (target == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    last_name_ = name;
    return last_ = target;
  }

 private:
  const py::dict& target_of_;
  PyObject* last_name_ = nullptr;
  int64_t last_ = 0;
};

bool equal(PyObject* a, PyObject* b) {
  return a == b || PyUnicode_Compare(a, b) == 0; // of strings, for which it does not fail
}

} // namespace

py::tuple select_places(const py::list& placed, const py::dict& target_of, const std::vector<int64_t>& wanted) {
  // Whatever happens to the list, when the collector or a name's __hash__ runs Python code.
  const auto held = py::reinterpret_steal<py::tuple>(PyList_AsTuple(placed.ptr()));
  if (!held) {
    throw py::error_already_set();
  }
  const std::unordered_set<int64_t> kept(wanted.begin(), wanted.end());
  std::vector<int64_t> tensor, first{0}, target_column, view_column;
  py::list views, left_out, tied, empty;
  py::dict filled_by;
  std::unordered_map<int64_t, PyObject*> name_of;
  std::unordered_map<PyObject*, int64_t> number_of;
  Targets targets(target_of);
  for (std::size_t i = 0; i < held.size(); ++i) {
    Py_ssize_t count = 0;
    PyObject* const* const places = items_of(PyTuple_GET_ITEM(held.ptr(), static_cast<Py_ssize_t>(i)), &count);
    for (Py_ssize_t j = 0; j < count; ++j) {
      Py_ssize_t fields = 0;
      PyObject* const* const place = items_of(places[j], &fields);
      if (fields != 2) {
        throw py::type_error("select_places: expected places of 2 fields, got " + std::to_string(fields));
      }
      PyObject *const name = place[0], *const view = place[1];
      const auto target = targets.find(name);
      PyObject* const filled = name_of.try_emplace(target, name).first->second;
      if (!equal(filled, name)) {
        left_out.append(py::make_tuple(target, i, py::handle(name), py::handle(view)));
        filled_by[py::int_(target)] = py::handle(filled);
        continue;
      }
      const auto [number, is_new] = number_of.try_emplace(view, static_cast<int64_t>(number_of.size()));
      if (is_new) {
        views.append(py::handle(view));
      }
      target_column.push_back(target);
      view_column.push_back(number->second);
    }
    const auto end = static_cast<int64_t>(target_column.size());
    if (count == 0) {
      empty.append(i);
    }
    if (end > first.back() || kept.count(static_cast<int64_t>(i)) != 0) {
      tensor.push_back(static_cast<int64_t>(i));
      first.push_back(end);
    } else if (count > 0) {
      tied.append(i);
    }
  }
  return py::make_tuple(
      as_column(tensor),
      as_column(first),
      as_column(target_column),
      as_column(view_column),
      views,
      left_out,
      filled_by,
      tied,
      empty);
}

} // namespace epload
