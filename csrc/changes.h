// Changes between two buffers: blocks of them, which are encoded one after the other, checked and applied. The format
// is in docs/sync.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>

namespace epload {

constexpr int64_t kChunkUnits = 1 << 16;
constexpr int64_t kUnitAt = 5; // where the header of a block has its unit

// A range of bytes that is read or written from its start. Reading past its end throws; who writes checks the room.
struct ChangesInput {
  const uint8_t* data;
  int64_t left;

  const uint8_t* take(int64_t nbytes) {
    TORCH_CHECK_VALUE(nbytes <= left, "the encoded changes end ", nbytes - left, " bytes too early; they are damaged");
    const auto* const begin = data;
    data += nbytes;
    left -= nbytes;
    return begin;
  }

  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
};

struct ChangesOutput {
  uint8_t* data;
  int64_t room;
  int64_t nbytes = 0;

  void put(const void* source, int64_t size) {
    std::memcpy(data + nbytes, source, static_cast<size_t>(size));
    nbytes += size;
  }

  template <typename T>
  void number(T value) {
    put(&value, sizeof(T));
  }
};

inline bool is_aligned(const uint8_t* data, int64_t unit) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit) == 0;
}

// Writes a block: its header, and its chunks. Returns the units that differ.
int64_t encode_block(
    const char* op, const uint8_t* base, const uint8_t* changed, int64_t nbytes, int64_t unit, ChangesOutput& out);

// Checks a block that begins at some byte of `nbytes` against its bytes in `base`, which may be null, and writes them
// if `writes` is set. Adds the units that change to `changed`; returns its length in bytes.
int64_t decode_block(
    const char* op, ChangesInput& in, int64_t begin, int64_t nbytes, uint8_t* base, bool writes, int64_t& changed);

// The bytes of encoded changes.
ChangesInput changes_in(const char* op, const at::Tensor& encoded);

// The units that encoded changes would change in a buffer of so many bytes. ValueError if they are damaged, of another
// format, or of a buffer of another size.
int64_t check_changes(const at::Tensor& encoded, int64_t nbytes);

// Applies them, after all are checked.
int64_t apply_changes(const at::Tensor& encoded, at::Tensor& base);

} // namespace epload
