// Reads many small Python objects faster than Python can: they lie all over memory, so that a walk through those of
// 25,000 modules waits for memory unless the next ones are prefetched. The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace epload {

// The addresses of all keys and values of a list of dicts. Equal to an earlier result if all dicts have the same keys
// and values, by address, in the same order.
pybind11::bytes dict_addresses(const pybind11::list& dicts);

// The same, and the values.
std::pair<pybind11::bytes, pybind11::list> dict_contents(const pybind11::list& dicts);

// An attribute of the referent of each weak reference (of None if it is gone), as `object` looks it up: a class's own
// __getattribute__ and __getattr__ are not called.
pybind11::list weakref_attributes(const pybind11::list& references, const pybind11::str& name);

// The value in a slot of each object's class, borrowed; null for objects of other classes, also of derived ones. `slot`
// is the descriptor that a class with __slots__ has for it.
std::vector<PyObject*> values_in_slot(const pybind11::list& objects, const pybind11::object& slot);

// For each object the address of the value in a slot of its class, 0 for objects of other classes; and the indices of
// those.
std::pair<pybind11::bytes, std::vector<std::size_t>> slot_addresses(
    const pybind11::list& objects, const pybind11::object& slot);

// For each object the value in a slot of its class, None for objects of other classes; and the indices of those.
std::pair<pybind11::list, std::vector<std::size_t>> slot_values(
    const pybind11::list& objects, const pybind11::object& slot);

// The indices of those containers that are not empty.
std::vector<std::size_t> nonempty(const pybind11::list& containers);

// All modules of a torch.nn.Module, itself included, each under every name it has, parents before children, in the
// order of its state_dict(); and for each the prefix of its tensors' names there. By attribute, without torch.
std::pair<pybind11::list, pybind11::list> find_modules(const pybind11::object& root);

// The values of dicts that are not None, and before them their names: each key after the prefix of its dict.
std::pair<pybind11::list, pybind11::list> named_values(const pybind11::list& prefixes, const pybind11::list& dicts);

// Attributes of many objects: one list for each name.
std::vector<pybind11::list> attributes(const pybind11::list& objects, const std::vector<pybind11::str>& names);

} // namespace epload
