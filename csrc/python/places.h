// The places of a checkpoint's tensors in a model. The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace epload {

// For each checkpoint tensor a tuple of places, each (name, view); and the number of the target that each name has.
//
// The columns (see columns.h) of those tensors that have a place, or are `wanted`: their numbers; where their places
// begin, and the end; for each place its target, and its view as an index into a list. Then that list; the places that
// are left out, as (target, tensor, name, view), because an earlier one fills that target under another name; that
// name of each target that is left out somewhere; the tensors of which nothing is kept; and those without places.
//
// Throws KeyError for a name that has no target, and TypeError for anything but such tuples.
pybind11::tuple select_places(
    const pybind11::list& placed, const pybind11::dict& target_of, const std::vector<int64_t>& wanted);

} // namespace epload
