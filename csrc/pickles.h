// Checks a pickle from a checkpoint before anything unpickles it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_set>

namespace epload {

// Follows the pickle that begins at byte `begin`, without calling, importing or hashing anything, and returns where it
// ends. Throws std::invalid_argument if it must not be unpickled: it is malformed, names something else than `allowed`
// (a module, a space and a name there; null for any name), or takes more time or memory than its bytes.
//
// A pickle of a few hundred bytes can build a tuple that contains itself twice as often at each level. Hashing it, as
// the key of a dict, or showing it in an error message, then takes forever. Others nest so deeply that hashing
// overflows the stack, or call an allowed function that allocates as many bytes as it is told to.
std::size_t check_pickle(std::string_view raw, std::size_t begin, const std::unordered_set<std::string>* allowed);

} // namespace epload
