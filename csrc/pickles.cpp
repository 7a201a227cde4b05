#include "pickles.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace epload {
namespace {

constexpr uint64_t kFreeValues = 5'000'000; // that any pickle may build, each counted as often as it occurs
constexpr uint64_t kValuesPerByte = 8;
constexpr int kMaxDepth = 100;

using Names = std::unordered_set<std::string>;

// Functions that torch allows for bytes. Given a number or another encoding, they take any amount of memory or time.
const Names kTextFunctions{"_codecs encode", "builtins bytearray", "__builtin__ bytearray"};
// Encodings that take time in proportion to the text. Pickles of bytes have latin1.
constexpr std::array<std::string_view, 4> kEncodings{"latin1", "latin-1", "ascii", "utf-8"};
// Classes that torch allows for the items of a list, a tuple or a dict. Given a tensor, they take as long as it has
// elements, which may be views of one.
const Names kContainers{
    "builtins set", "__builtin__ set", "torch Size", "collections Counter", "collections OrderedDict"};
// Copies a tensor, however many elements it has.
const std::string kCopyName = "torch._utils _rebuild_device_tensor_from_cpu_tensor";

enum class ValueKind : uint8_t {
  kPlain, // a number and the like
  kString,
  kBytes,
  kTuple,
  kList,      // a list, a set, or the keys and values of a dict
  kContainer, // the result of a call of one of kContainers
  kObject,    // the result of any other call: its arguments, and what was added to it, such as its state
  kName,      // the name of a class or function
  kTextFunction,
  kContainerClass,
  kCopyFunction,
};

using Index = uint32_t;

struct Value {
  ValueKind kind = ValueKind::kPlain;
  bool is_measured = false;
  uint8_t height = 0; // how deep its parts nest
  Index parts = 0;    // its last part
  std::string_view text = {};
  uint64_t size = 1; // number of values in it
};

struct Item {
  Index value, before;
};

constexpr Index kEmptyTuple = 1; // stands for all of them

// Opcodes of numbers and the like, and the bytes that follow.
constexpr std::array<std::pair<unsigned char, uint64_t>, 7> kNumbers{{
    {'K', 1},  // BININT1
    {'N', 0},  // NONE
    {0x88, 0}, // NEWTRUE
    {0x89, 0}, // NEWFALSE
    {'M', 2},  // BININT2
    {'J', 4},  // BININT
    {'G', 8},  // BINFLOAT
}};
// Opcodes of texts, and the bytes of the length that follows.
constexpr std::array<std::tuple<unsigned char, ValueKind, std::size_t>, 8> kTexts{{
    {'X', ValueKind::kString, 4},  // BINUNICODE
    {0x8c, ValueKind::kString, 1}, // SHORT_BINUNICODE
    {0x8d, ValueKind::kString, 8}, // BINUNICODE8
    {'U', ValueKind::kBytes, 1},   // SHORT_BINSTRING
    {'T', ValueKind::kBytes, 4},   // BINSTRING
    {'C', ValueKind::kBytes, 1},   // SHORT_BINBYTES
    {'B', ValueKind::kBytes, 4},   // BINBYTES
    {0x8e, ValueKind::kBytes, 8},  // BINBYTES8
}};

[[noreturn]] void fail(const std::string& fault) {
  throw std::invalid_argument("the pickle " + fault);
}

// A name for an error: printable, and of 80 characters at most.
std::string shown(std::string_view name) {
  std::string text(name.substr(0, 80));
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  std::replace(text.begin(), text.end(), ' ', '.');
  return text;
}

class Checker {
 public:
  Checker(std::string_view raw, std::size_t begin, const Names* allowed) : raw_(raw), at_(begin), allowed_(allowed) {
  }

  std::size_t run() {
    const auto begin = at_;
    if (raw_.size() >= 1U << 31) { // so that an Index can count the parts
      fail("has 2 GiB or more");
    }
    while (step(take(1)[0])) {
    }
    if (stack_.size() != 1 || !marks_.empty() || at_ < frame_end_) {
      fail("ends with values that nothing uses");
    }
    limit_ = kFreeValues + kValuesPerByte * (at_ - begin);
    measure(stack_[0], 0);
    return at_;
  }

 private:
  // ---- the bytes ----

  std::string_view take(uint64_t nbytes) {
    if (at_ > raw_.size() || nbytes > raw_.size() - at_) {
      fail("is truncated");
    }
    const auto bytes = raw_.substr(at_, nbytes);
    at_ += nbytes;
    return bytes;
  }

  uint64_t number(std::size_t nbytes) { // little-endian
    uint64_t value = 0;
    const auto bytes = take(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return value;
  }

  std::string_view line() {
    const auto end = raw_.find('\n', at_);
    if (end == std::string_view::npos) {
      fail("is truncated");
    }
    const auto bytes = take(end + 1 - at_);
    return bytes.substr(0, bytes.size() - 1);
  }

  // ---- the stack, of which values below the last mark are out of reach ----

  void push(Index value) {
    stack_.push_back(value);
  }

  void push_new(ValueKind kind, std::string_view text = {}) {
    values_.push_back({.kind = kind, .text = text});
    push(static_cast<Index>(values_.size() - 1));
  }

  // Where the last `count` values begin.
  std::size_t last(std::size_t count) const {
    if (stack_.size() - (marks_.empty() ? 0 : marks_.back()) < count) {
      fail("is malformed: it takes a value where there is none");
    }
    return stack_.size() - count;
  }

  Index top() const {
    return stack_[last(1)];
  }

  Index pop() {
    const auto value = top();
    stack_.pop_back();
    return value;
  }

  std::size_t pop_mark() {
    if (marks_.empty()) {
      fail("is malformed: it takes values where none were begun");
    }
    const auto mark = marks_.back();
    marks_.pop_back();
    return mark;
  }

  void add_item(Index whole, Index part) {
    items_.push_back({part, values_[whole].parts});
    values_[whole].parts = static_cast<Index>(items_.size() - 1);
  }

  // Moves the values from `first` on into a new tuple.
  void push_tuple(std::size_t first) {
    values_.push_back({.kind = ValueKind::kTuple});
    const auto tuple = static_cast<Index>(values_.size() - 1);
    for (auto i = first; i < stack_.size(); ++i) {
      add_item(tuple, stack_[i]);
    }
    stack_.resize(first);
    push(tuple);
  }

  // Moves the values from `first` on into the one before them.
  void add_items(std::size_t first) {
    const std::vector<Index> added(stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
    stack_.resize(first);
    const auto whole = top();
    const auto kind = values_[whole].kind;
    if (kind != ValueKind::kList && kind != ValueKind::kContainer && kind != ValueKind::kObject) {
      fail("is malformed: it adds to something that has no items");
    }
    for (const auto item : added) {
      add_item(whole, item);
    }
  }

  // The same of the keys and values of a dict. A dict of numbers or tuples may take the square of its length in time,
  // as their hashes can be chosen: what `allowed` is for has none.
  void add_pairs(std::size_t first) {
    for (auto i = first; i < stack_.size() && allowed_ != nullptr; i += 2) {
      const auto kind = values_[stack_[i]].kind;
      if (kind != ValueKind::kString && kind != ValueKind::kObject) {
        fail("has a dict whose keys are neither strings nor objects, which no checkpoint needs");
      }
    }
    add_items(first);
  }

  // ---- the memo ----

  void put(uint64_t index) {
    if (index > raw_.size()) { // an unpickler in C has an array of this length
      fail("refers to value " + std::to_string(index) + ", and has only " + std::to_string(raw_.size()) + " bytes");
    }
    if (index >= memo_.size()) {
      memo_.resize(index + 1, 0);
    }
    memo_count_ += memo_[index] == 0;
    memo_[index] = top() + 1;
  }

  void get(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == 0) {
      fail("is malformed: it refers to a value that it has not built");
    }
    push(memo_[index] - 1);
  }

  // ---- names and calls ----

  void push_name(std::string_view module, std::string_view name) {
    const auto full = std::string(module) + ' ' + std::string(name);
    if (allowed_ != nullptr && allowed_->count(full) == 0) {
      fail("names " + shown(full) + ", which no checkpoint needs");
    }
    auto kind = ValueKind::kName;
    if (kTextFunctions.count(full) != 0) {
      kind = ValueKind::kTextFunction;
    } else if (kContainers.count(full) != 0) {
      kind = ValueKind::kContainerClass;
    } else if (full == kCopyName) {
      kind = ValueKind::kCopyFunction;
    }
    push_new(kind);
  }

  void call() {
    const auto arguments = pop();
    const auto function = values_[pop()].kind;
    if (function < ValueKind::kName || values_[arguments].kind != ValueKind::kTuple) {
      fail("calls something that is no function");
    }
    if (function == ValueKind::kTextFunction) {
      return push(text_of(arguments));
    }
    if (function == ValueKind::kCopyFunction) {
      fail("calls " + shown(kCopyName) + ", which no checkpoint needs");
    }
    const auto is_container = function == ValueKind::kContainerClass;
    const auto argument = values_[arguments].parts;
    if (is_container && argument != 0) {
      const auto kind = values_[items_[argument].value].kind;
      const auto holds = kind == ValueKind::kTuple || kind == ValueKind::kList || kind == ValueKind::kContainer;
      if (!holds || items_[argument].before != 0) {
        fail("calls a container's class with something else than a list, tuple or dict");
      }
    }
    push_new(is_container ? ValueKind::kContainer : ValueKind::kObject);
    add_item(stack_.back(), arguments);
  }

  // Returns what one of kTextFunctions makes of a text and, maybe, an encoding.
  Index text_of(Index arguments) {
    Index text = 0;
    int count = 0;
    for (auto part = values_[arguments].parts; part != 0; part = items_[part].before) { // from the last to the first
      text = items_[part].value;
      const auto& value = values_[text];
      const auto is_text = value.kind == ValueKind::kString || value.kind == ValueKind::kBytes;
      const auto is_first = items_[part].before == 0;
      if (!is_text || ++count > 3 ||
          (!is_first && std::find(kEncodings.begin(), kEncodings.end(), value.text) == kEncodings.end())) {
        fail("calls a function for bytes with something else than text");
      }
    }
    return text;
  }

  // ---- one step: the opcodes of Python's pickletools that mean the same for any values ----

  // Returns false at the end.
  bool step(char opcode) {
    const auto code = static_cast<unsigned char>(opcode);
    if (opcode == '.') { // STOP
      return false;
    }
    if (!push_value(code) && !use_memo(code) && !build(code) && !use_protocol(code)) {
      fail("is malformed, or has opcode " + std::to_string(code));
    }
    return true;
  }

  bool push_value(unsigned char opcode) {
    for (const auto& [code, nbytes] : kNumbers) {
      if (code == opcode) {
        take(nbytes);
        push(0);
        return true;
      }
    }
    for (const auto& [code, kind, nbytes] : kTexts) {
      if (code == opcode) {
        push_new(kind, take(number(nbytes)));
        return true;
      }
    }
    if (opcode == 0x8a) { // LONG1
      take(number(1));
      push(0);
    }
    return opcode == 0x8a;
  }

  bool use_memo(unsigned char opcode) {
    switch (opcode) {
      case 'q': // BINPUT
        put(number(1));
        break;
      case 'r': // LONG_BINPUT
        put(number(4));
        break;
      case 0x94: // MEMOIZE
        put(memo_count_);
        break;
      case 'h': // BINGET
        get(number(1));
        break;
      case 'j': // LONG_BINGET
        get(number(4));
        break;
      default:
        return false;
    }
    return true;
  }

  bool build(unsigned char opcode) {
    switch (opcode) {
      case '(': // MARK
        marks_.push_back(stack_.size());
        break;
      case ')': // EMPTY_TUPLE
        push(kEmptyTuple);
        break;
      case 't': // TUPLE
        push_tuple(pop_mark());
        break;
      case 0x85: // TUPLE1
      case 0x86: // TUPLE2
      case 0x87: // TUPLE3
        push_tuple(last(opcode - 0x84U));
        break;
      case ']':  // EMPTY_LIST
      case '}':  // EMPTY_DICT
      case 0x8f: // EMPTY_SET
        push_new(ValueKind::kList);
        break;
      case 'e':  // APPENDS
      case 0x90: // ADDITEMS
        add_items(pop_mark());
        break;
      case 'u': // SETITEMS
        add_pairs(pop_mark());
        break;
      case 'a': // APPEND
      case 'b': // BUILD
        add_items(last(1));
        break;
      case 's': // SETITEM
        add_pairs(last(2));
        break;
      default:
        return false;
    }
    return true;
  }

  bool use_protocol(unsigned char opcode) {
    switch (opcode) {
      case 0x80: // PROTO
        if (number(1) > 5) {
          fail("has a protocol above 5");
        }
        break;
      case 0x95: { // FRAME
        const auto nbytes = number(8);
        const auto begin = at_;
        take(nbytes);
        frame_end_ = at_;
        at_ = begin;
        break;
      }
      case 'c': { // GLOBAL
        const auto module = line();
        push_name(module, line());
        break;
      }
      case 0x93: { // STACK_GLOBAL
        const auto name = values_[pop()], module = values_[pop()];
        if (name.kind != ValueKind::kString || module.kind != ValueKind::kString) {
          fail("is malformed: it names something by what is no string");
        }
        push_name(module.text, name.text);
        break;
      }
      case 0x81: // NEWOBJ
      case 'R':  // REDUCE
        call();
        break;
      case 'Q': { // BINPERSID
        const auto id = pop();
        if (allowed_ != nullptr) {
          fail("names a persistent object");
        }
        push_new(ValueKind::kObject);
        add_item(stack_.back(), id);
        break;
      }
      default:
        return false;
    }
    return true;
  }

  // ---- the size ----

  void measure(Index index, int depth) {
    if (depth > kMaxDepth) {
      fail("nests values more than " + std::to_string(kMaxDepth) + " deep");
    }
    if (values_[index].kind > ValueKind::kName) {
      fail("passes a function as a value"); // which hides its arguments
    }
    auto& value = values_[index];
    if (value.is_measured) {
      return;
    }
    value.size = 1 + value.text.size() / 16; // hashing a string again is free, showing it is not
    for (auto part = value.parts; part != 0; part = items_[part].before) {
      const auto inner = items_[part].value;
      measure(inner, depth + 1);
      value.size += values_[inner].size;
      value.height = std::max<uint8_t>(value.height, values_[inner].height + 1);
      if (value.size > limit_) {
        fail("builds values that are many times as large as the pickle itself");
      }
    }
    if (value.height > kMaxDepth) {
      fail("nests values more than " + std::to_string(kMaxDepth) + " deep");
    }
    value.is_measured = true;
  }

  std::string_view raw_;
  std::size_t at_;
  std::size_t frame_end_ = 0;
  const Names* allowed_;
  uint64_t limit_ = 0;
  std::vector<Value> values_{{}, {.kind = ValueKind::kTuple}}; // the first stands for all numbers and the like
  std::vector<Item> items_{1};                                 // the first stands for none
  std::vector<Index> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Index> memo_; // each above its value by 1; 0 for none
  uint64_t memo_count_ = 0;
};

} // namespace

std::size_t check_pickle(std::string_view raw, std::size_t begin, const std::unordered_set<std::string>* allowed) {
  return Checker(raw, begin, allowed).run();
}

} // namespace epload
