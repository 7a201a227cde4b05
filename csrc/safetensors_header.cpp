#include "safetensors_header.h"

#include <unordered_map>

namespace epload {
namespace {

constexpr size_t kMostDigits = 18; // that any int64 has room for

// Reads from the front of the text. Each function returns false, in an undefined place, if something else is there.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {
  }

  size_t at() const {
    return at_;
  }

  bool done() {
    skip_space();
    return at_ == text_.size();
  }

  bool take(char expected) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != expected) {
      return false;
    }
    ++at_;
    return true;
  }

  // A string without escapes, in printable ASCII.
  bool plain_string(std::string_view& value) {
    if (!take('"')) {
      return false;
    }
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= 0x20 && text_[at_] < 0x7f && text_[at_] != '"' && text_[at_] != '\\') {
      ++at_;
    }
    value = text_.substr(begin, at_ - begin);
    return take_here('"');
  }

  // Skips one that may have escapes and other characters, which are not checked.
  bool any_string() {
    if (!take('"')) {
      return false;
    }
    while (at_ < text_.size() && text_[at_] != '"') {
      at_ += text_[at_] == '\\' ? 2 : 1;
    }
    return take_here('"');
  }

  // What follows must be a comma or a bracket, so that no further digit, point or exponent is passed over.
  bool number(int64_t& value) {
    skip_space();
    const size_t begin = at_;
    value = 0;
    while (at_ < text_.size() && at_ - begin < kMostDigits && text_[at_] >= '0' && text_[at_] <= '9') {
      value = 10 * value + (text_[at_++] - '0');
    }
    const bool leading_zero = at_ - begin > 1 && text_[begin] == '0';
    return at_ > begin && !leading_zero;
  }

  bool numbers(std::vector<int64_t>& values) {
    values.clear();
    if (!take('[')) {
      return false;
    }
    if (take(']')) {
      return true;
    }
    do {
      if (!number(values.emplace_back())) {
        return false;
      }
    } while (take(','));
    return take(']');
  }

  // An object of strings.
  bool strings() {
    if (!take('{')) {
      return false;
    }
    if (take('}')) {
      return true;
    }
    do {
      if (!any_string() || !take(':') || !any_string()) {
        return false;
      }
    } while (take(','));
    return take('}');
  }

  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }

 private:
  bool take_here(char expected) {
    return at_ < text_.size() && text_[at_++] == expected;
  }

  std::string_view text_;
  size_t at_ = 0;
};

struct Entry {
  std::string_view dtype;
  std::vector<int64_t> shape, offsets;
};

bool read_entry(Reader& reader, Entry& entry) {
  bool dtype = false, shape = false, offsets = false;
  if (!reader.take('{')) {
    return false;
  }
  do {
    std::string_view key;
    if (!reader.plain_string(key) || !reader.take(':')) {
      return false;
    }
    bool& found = key == "dtype" ? dtype : key == "shape" ? shape : offsets;
    if (found || (&found == &offsets && key != "data_offsets")) {
      return false;
    }
    found = true;
    const bool fine = &found == &dtype   ? reader.plain_string(entry.dtype)
                      : &found == &shape ? reader.numbers(entry.shape)
                                         : reader.numbers(entry.offsets) && entry.offsets.size() == 2;
    if (!fine) {
      return false;
    }
  } while (reader.take(','));
  return reader.take('}') && dtype && shape && offsets;
}

} // namespace

std::optional<SafetensorsEntries> parse_safetensors(std::string_view header) {
  Reader reader(header);
  SafetensorsEntries entries;
  std::unordered_map<std::string, int64_t> known;
  Entry entry;
  std::string key;
  if (!reader.take('{')) {
    return std::nullopt;
  }
  if (reader.take('}')) {
    return reader.done() ? std::optional(entries) : std::nullopt;
  }
  do {
    std::string_view name;
    if (!reader.plain_string(name) || !reader.take(':')) {
      return std::nullopt;
    }
    if (name == "__metadata__") {
      reader.skip_space();
      const size_t begin = reader.at();
      if (entries.metadata || !reader.strings()) {
        return std::nullopt;
      }
      entries.metadata.emplace(begin, reader.at());
      continue;
    }
    if (!read_entry(reader, entry)) {
      return std::nullopt;
    }
    key.assign(entry.dtype);
    for (const auto dim : entry.shape) {
      key.append(1, ',').append(std::to_string(dim));
    }
    const auto [found, fresh] = known.try_emplace(key, static_cast<int64_t>(entries.kinds.size()));
    if (fresh) {
      entries.kinds.push_back({entry.dtype, entry.shape});
    }
    entries.names.push_back(name);
    entries.kind.push_back(found->second);
    entries.begin.push_back(entry.offsets[0]);
    entries.end.push_back(entry.offsets[1]);
  } while (reader.take(','));
  return reader.take('}') && reader.done() ? std::optional(std::move(entries)) : std::nullopt;
}

} // namespace epload
