// What has changed between two buffers of equal size, encoded so that a copy of the first becomes the second. The
// format is in docs/sync.md; an encoded buffer that came over a network is not trusted.
#include "changes.h"

#include "tensor_memory.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace epload {
namespace {

constexpr std::array<char, 4> kMagic{'e', 'p', 'l', 'd'};
constexpr uint8_t kFormat = 1;
constexpr int64_t kHeaderBytes = 16;
constexpr int64_t kCountBytes = 4;
constexpr uint8_t kLongGap = 255; // the gap follows in two bytes
enum Kind : uint8_t { kUnchanged, kWhole, kBitmap, kGaps };

constexpr int64_t kBlockUnits = 64;

// Returns a bit for each unit of a block, set if it differs.
template <typename Unit>
uint64_t compare_block(const Unit* base, const Unit* changed) {
  std::array<int8_t, kBlockUnits> differs; // a byte each, in a loop that compilers vectorize
  for (int64_t i = 0; i < kBlockUnits; ++i) {
    differs[i] = base[i] != changed[i] ? -1 : 0;
  }
  uint64_t mask = 0;
#ifdef __SSE2__
  for (int64_t i = 0; i < kBlockUnits; i += 16) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(differs.data() + i));
    mask |= uint64_t{static_cast<uint16_t>(_mm_movemask_epi8(bytes))} << i;
  }
#else
  for (int64_t i = 0; i < kBlockUnits; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, differs.data() + i, 8);
    mask |= ((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56) << i;
  }
#endif
  return mask;
}

// The units of a chunk that differ, ascending.
template <typename Unit>
int64_t find_changes(const Unit* base, const Unit* changed, int64_t units, uint16_t* positions) {
  constexpr uint64_t kTop = uint64_t{1} << 63;
  int64_t count = 0, first = 0;
  for (; first + kBlockUnits <= units; first += kBlockUnits) {
    auto mask = compare_block(base + first, changed + first);
    for (int i = 0; i < 3; ++i) { // without a branch, which processors would often predict wrongly
      positions[count] = static_cast<uint16_t>(first + __builtin_ctzll(mask | kTop));
      count += mask != 0;
      mask &= mask - 1;
    }
    for (; mask != 0; mask &= mask - 1) {
      positions[count++] = static_cast<uint16_t>(first + __builtin_ctzll(mask));
    }
  }
  for (; first < units; ++first) {
    if (base[first] != changed[first]) {
      positions[count++] = static_cast<uint16_t>(first);
    }
  }
  return count;
}

template <typename Unit>
int64_t count_changes(const Unit* base, const Unit* changed, int64_t units) {
  int64_t count = 0;
  for (int64_t i = 0; i < units; ++i) {
    count += base[i] != changed[i];
  }
  return count;
}

// Writes the gaps in front of the positions. Returns their bytes and those of their count; if there are more than
// `limit`, nothing is written, or only some.
int64_t list_gaps(const uint16_t* positions, int64_t count, int64_t limit, uint8_t* out) {
  if (kCountBytes + count > limit) {
    return kCountBytes + count;
  }
  const auto* const begin = out;
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto gap = positions[i] - next;
    *out++ = static_cast<uint8_t>(std::min<int64_t>(gap, kLongGap));
    if (gap >= kLongGap) {
      *out++ = static_cast<uint8_t>(gap);
      *out++ = static_cast<uint8_t>(gap >> 8);
    }
    next = positions[i] + 1;
  }
  return kCountBytes + (out - begin);
}

// Returns the units that differ.
template <typename Unit>
int64_t encode_chunk(const Unit* base, const Unit* changed, int64_t units, uint16_t* positions, ChangesOutput& out) {
  constexpr int64_t kSample = 256;
  if (units > kSample &&
      count_changes(base, changed, kSample) == kSample) { // need not be listed if all of it is like that
    const auto count = count_changes(base, changed, units);
    if (units / 8 + count * static_cast<int64_t>(sizeof(Unit)) >= units * static_cast<int64_t>(sizeof(Unit))) {
      out.number<uint8_t>(kWhole);
      out.put(changed, units * static_cast<int64_t>(sizeof(Unit)));
      return count;
    }
  }
  const auto count = find_changes(base, changed, units, positions);
  if (count == 0) {
    out.number<uint8_t>(kUnchanged);
    return 0;
  }
  const int64_t bitmap_bytes = (units + 7) / 8, size = sizeof(Unit), values = count * size;
  const auto gap_bytes = list_gaps(positions, count, bitmap_bytes, out.data + out.nbytes + 1 + kCountBytes);
  if (std::min(gap_bytes, bitmap_bytes) + values >= units * size) {
    out.number<uint8_t>(kWhole);
    out.put(changed, units * size);
    return count;
  }
  if (gap_bytes <= bitmap_bytes) {
    out.number<uint8_t>(kGaps);
    out.number(static_cast<uint32_t>(count));
    out.nbytes += gap_bytes - kCountBytes;
  } else {
    out.number<uint8_t>(kBitmap);
    auto* const bits = out.data + out.nbytes;
    std::memset(bits, 0, static_cast<size_t>(bitmap_bytes));
    for (int64_t i = 0; i < count; ++i) {
      bits[positions[i] / 8] |= static_cast<uint8_t>(1 << positions[i] % 8);
    }
    out.nbytes += bitmap_bytes;
  }
  for (int64_t i = 0; i < count; ++i) {
    out.number(changed[positions[i]]);
  }
  return count;
}

template <typename Unit>
int64_t encode_all(const uint8_t* base, const uint8_t* changed, int64_t nbytes, ChangesOutput& out) {
  const int64_t units = nbytes / static_cast<int64_t>(sizeof(Unit));
  thread_local std::vector<uint16_t> positions(kChunkUnits); // making one takes longer than a small block
  int64_t count = 0;
  for (int64_t first = 0; first < units; first += kChunkUnits) {
    const auto offset = first * static_cast<int64_t>(sizeof(Unit));
    count += encode_chunk(
        reinterpret_cast<const Unit*>(base + offset),
        reinterpret_cast<const Unit*>(changed + offset),
        std::min(kChunkUnits, units - first),
        positions.data(),
        out);
  }
  return count;
}

// Decodes a chunk; writes it unless `base` is null, which only checks it. Returns the units that it changes.
// `positions` has room for one for each unit.
template <typename Unit>
int64_t decode_chunk(ChangesInput& in, int64_t units, uint16_t* positions, Unit* base) {
  constexpr int64_t size = sizeof(Unit);
  const auto kind = in.number<uint8_t>();
  if (kind == kUnchanged) {
    return 0;
  }
  if (kind == kWhole) {
    const auto* const values = in.take(units * size);
    if (base != nullptr) {
      std::memcpy(base, values, static_cast<size_t>(units * size));
    }
    return units;
  }
  TORCH_CHECK_VALUE(
      kind == kBitmap || kind == kGaps,
      "expected a kind of chunk from 0 to 3, got ",
      int{kind},
      "; the encoded changes are damaged");
  int64_t count = 0, next = 0;
  if (kind == kGaps) {
    const int64_t total = in.number<uint32_t>();
    TORCH_CHECK_VALUE(total <= units, total, " changes in a chunk of ", units, "; the encoded changes are damaged");
    const auto* gaps = in.data;
    const auto* const end = gaps + in.left;
    for (; count < total && gaps < end; ++count) {
      int64_t gap = *gaps++;
      if (gap == kLongGap) {
        if (end - gaps < 2) {
          break;
        }
        gap = gaps[0] | gaps[1] << 8;
        gaps += 2;
      }
      next += gap;
      positions[count] = static_cast<uint16_t>(next++);
    }
    TORCH_CHECK_VALUE(count == total, "the encoded changes end too early; they are damaged");
    TORCH_CHECK_VALUE(next <= units, "a change behind the end of its chunk; the encoded changes are damaged");
    in.take(gaps - in.data);
  } else {
    const auto* const bits = in.take((units + 7) / 8);
    TORCH_CHECK_VALUE(
        units % 8 == 0 || bits[units / 8] >> units % 8 == 0,
        "a change behind the end of its chunk; the encoded changes are damaged");
    for (int64_t byte = 0; byte < (units + 7) / 8; ++byte) {
      for (unsigned left = bits[byte]; left != 0; left &= left - 1) {
        positions[count++] = static_cast<uint16_t>(byte * 8 + __builtin_ctz(left));
      }
    }
  }
  const auto* const values = in.take(count * size);
  for (int64_t i = 0; base != nullptr && i < count; ++i) {
    std::memcpy(base + positions[i], values + i * size, size);
  }
  return count;
}

template <typename Unit>
int64_t decode_all(ChangesInput& in, int64_t nbytes, uint8_t* base) {
  const int64_t units = nbytes / static_cast<int64_t>(sizeof(Unit));
  thread_local std::vector<uint16_t> positions(kChunkUnits);
  int64_t changed = 0;
  for (int64_t first = 0; first < units; first += kChunkUnits) {
    auto* const chunk = base != nullptr ? reinterpret_cast<Unit*>(base) + first : nullptr;
    changed += decode_chunk(in, std::min(kChunkUnits, units - first), positions.data(), chunk);
  }
  return changed;
}

// Calls a generic function with a value of the unsigned type of so many bytes.
template <typename Function>
int64_t with_unit(const char* op, int64_t unit, const Function& call) {
  switch (unit) {
    case 1:
      return call(uint8_t{});
    case 2:
      return call(uint16_t{});
    case 4:
      return call(uint32_t{});
    case 8:
      return call(uint64_t{});
    default:
      TORCH_CHECK_VALUE(false, op, ": expected a unit of 1, 2, 4 or 8 bytes, got ", unit);
  }
}

void check_unit(const char* op, const uint8_t* data, int64_t nbytes, int64_t unit) {
  TORCH_CHECK_VALUE(
      nbytes % unit == 0 && is_aligned(data, unit),
      op,
      ": expected a buffer that starts and ends at a multiple of ",
      unit,
      " bytes");
}

} // namespace

int64_t encode_block(
    const char* op, const uint8_t* base, const uint8_t* changed, int64_t nbytes, int64_t unit, ChangesOutput& out) {
  return with_unit(op, unit, [&](auto type) {
    check_unit(op, base, nbytes, unit);
    check_unit(op, changed, nbytes, unit);
    const auto needed = kHeaderBytes + (nbytes / unit + kChunkUnits - 1) / kChunkUnits + nbytes;
    TORCH_CHECK_VALUE(
        out.room - out.nbytes >= needed, op, ": expected room for ", out.nbytes + needed, " bytes, got ", out.room);
    out.put(kMagic.data(), kMagic.size());
    out.number(kFormat);
    out.number(static_cast<uint8_t>(unit));
    out.number<uint16_t>(0);
    out.number(nbytes);
    return encode_all<decltype(type)>(base, changed, nbytes, out);
  });
}

int64_t decode_block(
    const char* op, ChangesInput& in, int64_t begin, int64_t nbytes, uint8_t* base, bool writes, int64_t& changed) {
  TORCH_CHECK_VALUE(
      std::memcmp(in.take(kMagic.size()), kMagic.data(), kMagic.size()) == 0, op, ": these are no encoded changes");
  const auto format = in.number<uint8_t>();
  TORCH_CHECK_VALUE(format == kFormat, op, ": expected changes of format ", int{kFormat}, ", got ", int{format});
  const int64_t unit = in.number<uint8_t>();
  in.number<uint16_t>();
  const auto length = in.number<int64_t>();
  TORCH_CHECK_VALUE(
      length >= 0 && length <= nbytes - begin,
      op,
      ": expected changes of ",
      nbytes - begin,
      " bytes, got those of ",
      length);
  changed += with_unit(op, unit, [&](auto type) {
    check_unit(op, base, length, unit);
    TORCH_CHECK_VALUE(
        begin % unit == 0, op, ": expected a block at a multiple of ", unit, " bytes, got one at ", begin);
    return decode_all<decltype(type)>(in, length, writes ? base : nullptr);
  });
  return length;
}

ChangesInput changes_in(const char* op, const at::Tensor& encoded) {
  check_array(op, "the encoded changes", encoded, at::kByte, 1);
  return {encoded.const_data_ptr<uint8_t>(), encoded.numel()};
}

namespace {

std::tuple<int64_t, int64_t> encode_changes(
    const at::Tensor& base, const at::Tensor& changed, int64_t unit, at::Tensor& out) {
  constexpr auto op = "encode_changes";
  check_array(op, "base", base, at::kByte, 1);
  check_array(op, "changed", changed, at::kByte, 1);
  check_array(op, "out", out, at::kByte, 1);
  const auto nbytes = base.numel();
  TORCH_CHECK_VALUE(changed.numel() == nbytes, op, ": expected ", nbytes, " changed bytes, got ", changed.numel());
  TORCH_CHECK_VALUE(!out.is_alias_of(base) && !out.is_alias_of(changed), op, ": expected out to be other memory");
  ChangesOutput output{out.mutable_data_ptr<uint8_t>(), out.numel()};
  const auto count =
      encode_block(op, base.const_data_ptr<uint8_t>(), changed.const_data_ptr<uint8_t>(), nbytes, unit, output);
  mark_written({out});
  return {output.nbytes, count};
}

// Checks all blocks, and writes them if `writes` is set. Returns the units that change.
int64_t decode(const char* op, ChangesInput in, int64_t nbytes, uint8_t* base, bool writes) {
  int64_t changed = 0, begin = 0;
  do {
    begin += decode_block(op, in, begin, nbytes, base != nullptr ? base + begin : nullptr, writes, changed);
  } while (in.left > 0);
  TORCH_CHECK_VALUE(begin == nbytes, op, ": expected changes of ", nbytes, " bytes, got those of ", begin);
  return changed;
}

} // namespace

int64_t check_changes(const at::Tensor& encoded, int64_t nbytes) {
  return decode("check_changes", changes_in("check_changes", encoded), nbytes, nullptr, false);
}

int64_t apply_changes(const at::Tensor& encoded, at::Tensor& base) {
  constexpr auto op = "apply_changes";
  check_array(op, "base", base, at::kByte, 1);
  const auto in = changes_in(op, encoded);
  TORCH_CHECK_VALUE(!encoded.is_alias_of(base), op, ": expected the changes to be other memory");
  auto* const bytes = base.mutable_data_ptr<uint8_t>();
  const auto changed = decode(op, in, base.numel(), bytes, false);
  mark_written({base});
  decode(op, in, base.numel(), bytes, true);
  return changed;
}

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("encode_changes", TORCH_FN(epload::encode_changes));
  m.impl("check_changes", TORCH_FN(epload::check_changes));
  m.impl("apply_changes", TORCH_FN(epload::apply_changes));
}
