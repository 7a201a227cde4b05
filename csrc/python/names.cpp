#include "names.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace epload {
namespace {

// A name as UTF-8, without a copy if it is ASCII.
class Utf8 {
 public:
  explicit Utf8(PyObject* name) {
    if (PyUnicode_IS_ASCII(name)) {
      view_ = {
          reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(name)), static_cast<size_t>(PyUnicode_GET_LENGTH(name))};
      return;
    }
    encoded_ = py::reinterpret_steal<py::object>(PyUnicode_AsEncodedString(name, "utf-8", "surrogatepass"));
    if (!encoded_) {
      throw py::error_already_set();
    }
    view_ = {PyBytes_AS_STRING(encoded_.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(encoded_.ptr()))};
  }

  std::string_view view() const {
    return view_;
  }

 private:
  py::object encoded_;
  std::string_view view_;
};

// The names, which live at least as long, whatever happens to the list.
py::tuple held(const py::list& names) {
  auto all = py::reinterpret_steal<py::tuple>(PyList_AsTuple(names.ptr()));
  if (!all) {
    throw py::error_already_set();
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    PyObject* const name = PyTuple_GET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyUnicode_Check(name)) {
      throw py::type_error(
          "expected names to be str, got " + std::string(Py_TYPE(name)->tp_name) + " at " + std::to_string(i));
    }
  }
  return all;
}

py::str substring(PyObject* name, Py_ssize_t begin, Py_ssize_t end) {
  auto part = py::reinterpret_steal<py::str>(PyUnicode_Substring(name, begin, end));
  if (!part) {
    throw py::error_already_set();
  }
  return part;
}

// As int(text), and without Python if it is a short row of ASCII digits.
py::object parse_index(PyObject* name, Py_ssize_t begin, Py_ssize_t end) {
  if (PyUnicode_IS_ASCII(name) && begin < end && end - begin < 18) {
    const auto* const text = PyUnicode_1BYTE_DATA(name);
    int64_t value = 0;
    auto at = begin;
    for (; at < end && text[at] >= '0' && text[at] <= '9'; ++at) {
      value = 10 * value + (text[at] - '0');
    }
    if (at == end) {
      return py::int_(value);
    }
  }
  const auto text = substring(name, begin, end);
  auto number = py::reinterpret_steal<py::object>(PyLong_FromUnicodeObject(text.ptr(), 10));
  if (!number) {
    if (PyErr_ExceptionMatches(PyExc_ValueError) != 0) {
      PyErr_Format(PyExc_ValueError, "expected an integer as the index in %R, got %R", name, text.ptr());
    }
    throw py::error_already_set();
  }
  return number;
}

struct Match {
  bool found = false;
  int64_t rule = 0;
  int64_t input = 0;
  Py_ssize_t begin = 0;
  Py_ssize_t end = 0;
  bool has_index = false;
  Py_ssize_t index_begin = 0;
  Py_ssize_t index_end = 0;
  py::str target;
};

std::vector<Match> parse_matches(const py::list& matches) {
  std::vector<Match> parsed;
  for (const auto& each : matches) {
    Match match;
    if (!each.is_none()) {
      const auto fields = each.cast<py::tuple>();
      if (fields.size() != 7) {
        throw py::value_error("group_names: expected matches of 7 fields, got " + std::to_string(fields.size()));
      }
      match = {
          true,
          fields[0].cast<int64_t>(),
          fields[1].cast<int64_t>(),
          fields[2].cast<Py_ssize_t>(),
          fields[3].cast<Py_ssize_t>(),
          !fields[4].is_none(),
          0,
          0,
          fields[6].cast<py::str>()};
      if (match.has_index) {
        match.index_begin = fields[4].cast<Py_ssize_t>();
        match.index_end = fields[5].cast<Py_ssize_t>();
      }
    }
    parsed.push_back(std::move(match));
  }
  return parsed;
}

// The name that a match gives, in `made`, after the number of its rule.
void write_key(PyObject* name, const Match& match, std::string& made) {
  const auto length = PyUnicode_GET_LENGTH(name);
  const auto inside = [length](Py_ssize_t begin, Py_ssize_t end) {
    return 0 <= begin && begin <= end && end <= length;
  };
  if (!inside(match.begin, match.end) || !inside(match.index_begin, match.index_end)) {
    throw py::value_error("group_names: expected matches within the names");
  }
  made.assign(reinterpret_cast<const char*>(&match.rule), sizeof(match.rule));
  const Utf8 target(match.target.ptr());
  if (PyUnicode_IS_ASCII(name)) {
    const auto text = Utf8(name).view();
    made.append(text.substr(0, match.begin)).append(target.view()).append(text.substr(match.end));
    return;
  }
  const auto before = substring(name, 0, match.begin);
  const auto after = substring(name, match.end, length);
  made.append(Utf8(before.ptr()).view()).append(target.view()).append(Utf8(after.ptr()).view());
}

struct Group {
  py::list sources, inputs, indices;
};

} // namespace

std::pair<std::vector<std::size_t>, std::vector<std::size_t>> number_by_digits(const py::list& names) {
  const auto all = held(names);
  std::vector<std::size_t> kind_of, first;
  kind_of.reserve(all.size());
  std::unordered_map<std::string, std::size_t> known;
  std::string masked;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Utf8 name(PyTuple_GET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i)));
    masked.assign(name.view());
    for (auto& character : masked) {
      character = character >= '0' && character <= '9' ? '0' : character;
    }
    const auto [found, is_new] = known.try_emplace(masked, first.size());
    if (is_new) {
      first.push_back(i);
    }
    kind_of.push_back(found->second);
  }
  return {std::move(kind_of), std::move(first)};
}

std::pair<py::list, py::list> group_names(
    const py::list& names, const std::vector<std::size_t>& kind_of, const py::list& matches) {
  const auto all = held(names);
  const auto parsed = parse_matches(matches);
  if (kind_of.size() != all.size()) {
    throw py::value_error("group_names: expected a kind for each name");
  }
  std::vector<Group> groups;
  std::unordered_map<std::string, std::size_t> known;
  py::list others;
  std::string key, last;
  std::size_t group = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& match = parsed.at(kind_of[i]);
    if (!match.found) {
      others.append(i);
      continue;
    }
    PyObject* const name = PyTuple_GET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i));
    write_key(name, match, key);
    if (groups.empty() || key != last) { // the tensors of a group mostly follow one another
      const auto [found, is_new] = known.try_emplace(key, groups.size());
      if (is_new) {
        groups.emplace_back();
      }
      group = found->second;
      last = key;
    }
    auto& [sources, inputs, indices] = groups[group];
    sources.append(i);
    inputs.append(match.input);
    indices.append(match.has_index ? parse_index(name, match.index_begin, match.index_end) : py::int_(-1));
  }
  py::list listed;
  for (const auto& each : groups) {
    listed.append(py::make_tuple(each.sources, each.inputs, each.indices));
  }
  return {std::move(listed), std::move(others)};
}

} // namespace epload
