// Compares and groups the thousands of names of a checkpoint at once. The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace epload {

// For each name a number, the same for all names that are equal once each ASCII digit is replaced by 0; and for each
// number the index of its first name.
std::pair<std::vector<std::size_t>, std::vector<std::size_t>> number_by_digits(const pybind11::list& names);

// Groups names that one rule gives the same name: (names by number, the input and the index of each). An index is the
// integer in the name, -1 if there is none. And the numbers of the names that no rule takes. In the order of the names.
//
// `matches` has for each kind of name what is found in it, or None: (rule, input, begin, end, index_begin, index_end,
// target). `target` replaces the characters in [begin, end); index_begin is None where there is no index.
std::pair<pybind11::list, pybind11::list> group_names(
    const pybind11::list& names, const std::vector<std::size_t>& kind_of, const pybind11::list& matches);

} // namespace epload
