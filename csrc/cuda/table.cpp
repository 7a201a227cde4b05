#include "table.h"

#include <algorithm>
#include <array>

namespace epload::cuda {
namespace {

bool divides(int64_t width, const char* data) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(width) == 0;
}

bool divides(int64_t width, const Side& side, int64_t dims) {
  return std::all_of(side.stride, side.stride + dims, [&](int64_t stride) { return stride % width == 0; });
}

// How a run is cut: `head` elements up to where units of `unit` elements are aligned on both sides, as many of these as
// fit, and the rest. Head and rest go in units of `odd` elements.
struct Cut {
  int64_t head, unit, odd;
};

// Without conversion the elements are bytes.
Cut cut_bytes(const Side& from, const Side& to, int64_t run, int64_t dims) {
  for (int64_t width = 16; width > 1; width /= 2) {
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from.data) % static_cast<uintptr_t>(width));
    const int64_t head = (width - past) % width;
    if (head + width <= run && divides(width, to.data + head) && divides(width, from, dims) &&
        divides(width, to, dims)) {
      int64_t odd = width;
      while (head % odd != 0 || (run - head) % odd != 0) {
        odd /= 2;
      }
      return {head, width, odd};
    }
  }
  return {0, 1, 1};
}

Cut cut_numbers(const Side& from, const Side& to, int64_t run, int64_t dims) {
  const int64_t from_width = std::min<int64_t>(16, kVector * from.itemsize);
  const int64_t to_width = std::min<int64_t>(16, kVector * to.itemsize);
  if (divides(from_width, from, dims) && divides(to_width, to, dims)) {
    for (int64_t head = 0; head < kVector && head + kVector <= run; ++head) {
      if (divides(from_width, from.data + head * from.itemsize) && divides(to_width, to.data + head * to.itemsize)) {
        return {head, kVector, 1};
      }
    }
  }
  return {0, 1, 1};
}

// A part of every run that is moved in units of one size: its first element, its elements, the elements of a unit.
struct Piece {
  int64_t begin, count, unit;

  // Whether a run has several units: then they are a dim of their own.
  bool inner() const {
    return count > unit;
  }
};

// Whether the kernel can count a piece of `rows` runs with `dims` outer dims.
bool countable(const Piece& piece, int64_t rows, int64_t dims) {
  int64_t units = 0;
  const bool counted = !__builtin_mul_overflow(piece.count / piece.unit, rows, &units);
  return counted && units < static_cast<int64_t>(kMaxUnits) && (units == 0 || dims + piece.inner() <= kDims);
}

Region region_of(
    const Piece& piece, const Side& from, const Side& to, int64_t rows, const int64_t* size, int64_t dims) {
  Region region{};
  region.source = from.data + piece.begin * from.itemsize;
  region.target = to.data + piece.begin * to.itemsize;
  region.units = static_cast<uint32_t>(piece.count / piece.unit * rows);
  region.width = from.number == Number::kNone ? static_cast<uint8_t>(piece.unit) : 0;
  region.from = from.number;
  region.to = to.number;
  region.vector = static_cast<uint32_t>(piece.unit);
  const auto append = [&](int64_t count, int64_t from_stride, int64_t to_stride) {
    region.size[region.dims] = Divider::of(static_cast<uint32_t>(count));
    region.source_stride[region.dims] = from_stride;
    region.target_stride[region.dims] = to_stride;
    ++region.dims;
  };
  if (piece.inner() || dims == 0) {
    append(piece.count / piece.unit, piece.unit * from.itemsize, piece.unit * to.itemsize);
  }
  for (int64_t d = dims; d-- > 0;) {
    append(size[d], from.stride[d], to.stride[d]);
  }
  return region;
}

} // namespace

bool Table::add(const Side& from_side, const Side& to_side, int64_t run, const int64_t* size, int64_t dims) {
  Side from = from_side, to = to_side;
  const bool convert = from.number != Number::kNone;
  if (!convert) {
    run *= from.itemsize;
    from.itemsize = to.itemsize = 1;
  } else if (!divides(from.itemsize, from.data) || !divides(to.itemsize, to.data)) {
    return false;
  }
  int64_t rows = 1;
  for (int64_t d = 0; d < dims; ++d) {
    if (__builtin_mul_overflow(rows, size[d], &rows)) {
      return false;
    }
  }
  if (rows == 0 || run == 0) {
    return true;
  }
  const Cut cut = convert ? cut_numbers(from, to, run, dims) : cut_bytes(from, to, run, dims);
  const int64_t body = (run - cut.head) / cut.unit * cut.unit;
  const std::array<Piece, 3> pieces{
      Piece{cut.head, body, cut.unit},
      Piece{0, cut.head, cut.odd},
      Piece{cut.head + body, run - cut.head - body, cut.odd}};
  if (!std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return countable(piece, rows, dims); })) {
    return false;
  }
  for (const auto& piece : pieces) {
    if (piece.count == 0) {
      continue;
    }
    const Region region = region_of(piece, from, to, rows, size, dims);
    for (uint32_t index = 0; index * static_cast<uint64_t>(kChunkUnits) < region.units; ++index) {
      chunks_.push_back({regions(), index});
    }
    regions_.push_back(region);
  }
  converts_ |= convert;
  return true;
}

void Table::write(char* to) const {
  const auto* regions = reinterpret_cast<const char*>(regions_.data());
  const auto* chunks = reinterpret_cast<const char*>(chunks_.data());
  to = std::copy(regions, regions + regions_.size() * sizeof(Region), to);
  std::copy(chunks, chunks + chunks_.size() * sizeof(Chunk), to);
}

} // namespace epload::cuda
