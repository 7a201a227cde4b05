// What is in many small Python objects, read faster than Python can: they lie all over memory, so that a walk through
// those of 25,000 modules waits for memory unless what comes next is fetched beforehand. The caller holds the
// interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace epload {

// Of a list of dicts: a string that is equal to an earlier one if all have the same keys and values, by address, in the
// same order.
pybind11::bytes addresses(const pybind11::list& dicts);

// The same, and the values.
std::pair<pybind11::bytes, pybind11::list> contents(const pybind11::list& dicts);

// An attribute of what each of some weak references refers to (of None if that has gone), as `object` looks it up: a
// class' own __getattribute__ and __getattr__ are not asked.
pybind11::list attributes(const pybind11::list& references, const pybind11::str& name);

// The address of what each of some objects has in a slot of its class, of objects of other classes 0; and the positions
// of those. `slot` is the descriptor that a class with __slots__ has for it; a class derived from that one is another.
std::pair<pybind11::bytes, std::vector<std::size_t>> held(const pybind11::list& objects, const pybind11::object& slot);

// What each of some objects has in a slot of its class, None for objects of other classes; and the positions of those.
std::pair<pybind11::list, std::vector<std::size_t>> values(const pybind11::list& objects, const pybind11::object& slot);

// Passes a list of tensors to libepload, which is loaded, and returns the ticket that torch.ops.epload.gather takes.
// Throws TypeError if one is no tensor. A ticket that is not taken keeps the tensors alive.
std::int64_t hand_over(const pybind11::list& tensors);

// Whether nothing is in any of these containers.
bool all_empty(const pybind11::list& containers);

} // namespace epload
