#include "table.h"

#include <algorithm>
#include <array>

namespace epload::cuda {
namespace {

constexpr int64_t kRunUnits = kChunkUnits / 2; // a run of so many gets chunks of its own; shorter ones share chunks

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

// Calls row(where it starts on each side) for each of the runs that `size` and the strides make.
template <typename Row>
void for_rows(const Side& from, const Side& to, const int64_t* size, int64_t dims, const Row& row) {
  if (dims == 0) {
    row(from.data, to.data);
    return;
  }
  Side inner_from = from, inner_to = to;
  ++inner_from.stride;
  ++inner_to.stride;
  for (int64_t i = 0; i < size[0]; ++i) {
    for_rows(inner_from, inner_to, size + 1, dims - 1, row);
    inner_from.data += from.stride[0];
    inner_to.data += to.stride[0];
  }
}

} // namespace

void Table::add_run(const char* source, char* target, int64_t units, int64_t width) {
  for (int64_t first = 0; first < units; first += kChunkUnits) {
    Chunk chunk{};
    chunk.source = source + first * width;
    chunk.target = target + first * width;
    chunk.units = static_cast<uint32_t>(std::min<int64_t>(units - first, kChunkUnits));
    chunk.width = static_cast<uint8_t>(width);
    chunks_.push_back(chunk);
  }
}

void Table::add_box(
    const Side& from, const Side& to, int64_t run, int64_t unit, int64_t rows, const int64_t* size, int64_t dims) {
  Chunk chunk{};
  chunk.source = from.data;
  chunk.target = to.data;
  chunk.dim = static_cast<uint32_t>(dims_.size());
  chunk.width = static_cast<uint8_t>(unit);
  chunk.from = from.number;
  chunk.to = to.number;
  const auto append = [&](int64_t count, int64_t from_stride, int64_t to_stride) {
    dims_.push_back({from_stride, to_stride, Divider::of(static_cast<uint32_t>(count))});
    ++chunk.dims;
  };
  if (run > unit || dims == 0) {
    append(run / unit, unit * from.itemsize, unit * to.itemsize);
  }
  for (int64_t d = dims; d-- > 0;) {
    append(size[d], from.stride[d], to.stride[d]);
  }
  const int64_t units = run / unit * rows;
  for (int64_t first = 0; first < units; first += kChunkUnits) {
    chunk.first = static_cast<uint32_t>(first);
    chunk.units = static_cast<uint32_t>(std::min<int64_t>(units - first, kChunkUnits));
    chunks_.push_back(chunk);
  }
}

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
    Side source = from, target = to;
    source.data += piece.begin * from.itemsize;
    target.data += piece.begin * to.itemsize;
    if (!convert && (dims == 0 || piece.count / piece.unit >= kRunUnits)) {
      for_rows(source, target, size, dims, [&](const char* there, char* here) {
        add_run(there, here, piece.count / piece.unit, piece.unit);
      });
    } else {
      add_box(source, target, piece.count, piece.unit, rows, size, dims);
    }
  }
  converts_ |= convert;
  return true;
}

void Table::write(char* to) const {
  static_assert(sizeof(Chunk) == sizeof(Record) && sizeof(Dim) == sizeof(Record), "a table is an array of records");
  const auto* chunks = reinterpret_cast<const char*>(chunks_.data());
  const auto* dims = reinterpret_cast<const char*>(dims_.data());
  to = std::copy(chunks, chunks + chunks_.size() * sizeof(Chunk), to);
  std::copy(dims, dims + dims_.size() * sizeof(Dim), to);
}

} // namespace epload::cuda
