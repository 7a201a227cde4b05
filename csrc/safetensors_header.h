// Parses the JSON header of a safetensors file, if it has the form that writers give it. Integers and bytes only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace epload {

// The entries of a header, in its order. Views are of the header's bytes.
struct SafetensorsEntries {
  struct Kind {
    std::string_view dtype;
    std::vector<int64_t> shape;
  };

  std::vector<std::string_view> names;
  std::vector<int64_t> kind, begin, end;             // of each name: an index into `kinds`, and its data_offsets
  std::vector<Kind> kinds;                           // distinct
  std::optional<std::pair<size_t, size_t>> metadata; // where its value begins and ends
};

// Nothing for any other JSON, right or wrong: escapes or characters beyond ASCII in names, numbers of more than 18
// digits or with a sign, more or fewer keys in an entry than dtype, shape and data_offsets, metadata that is not an
// object of strings. Keys may come twice.
std::optional<SafetensorsEntries> parse_safetensors(std::string_view header);

} // namespace epload
