// The batched copy as a table of equal chunks, and the work of one lane of a warp on one chunk. This is the whole of
// the kernel but its launch, and compiles for the host too, where tests run it over plain memory.
#pragma once

#include "api.h"
#include "float_formats.h"

#include <type_traits>

#ifdef __CUDACC__
#define EPLOAD_UNROLL _Pragma("unroll")
#define EPLOAD_NO_UNROLL _Pragma("unroll 1")
#else
#define EPLOAD_UNROLL
#define EPLOAD_NO_UNROLL
#endif

namespace epload::cuda {

constexpr int kDims = 4;                 // of a region, after contiguous dims are merged
constexpr uint32_t kLanes = 32;          // one warp works on one chunk
constexpr uint32_t kChunkUnits = 512;    // so that tiny regions cost a warp, not a block, and huge ones spread evenly
constexpr int kVector = 8;               // numbers in one unit of a converting region whose alignment allows it
constexpr uint64_t kMaxUnits = 1u << 31; // of one region; what Divider is exact for

// Division of numbers below 2^31 by a constant, as multiply-high, add and shift: for d and l = ceil(log2 d),
// m = floor(2^32 (2^l - d) / d) + 1 gives n / d = (hi(n m) + n) >> l (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t divisor, multiplier, shift;

  static Divider of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t multiplier = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
    return {divisor, static_cast<uint32_t>(multiplier), shift};
  }

  EPLOAD_HD uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return (high + n) >> shift;
  }
};

struct alignas(16) Word16 {
  uint32_t part[4];
};

// At most kChunkUnits units, each contiguous on both sides: `width` bytes (16, 8, 4, 2 or 1) where nothing is
// converted, else kVector numbers or one. A chunk whose units follow one another on both sides, as most do, says all
// there is to know of it. Of another one, which is a part of a strided box, the dims have to be read too.
struct alignas(16) Chunk {
  const char* source; // of its first unit; of its box if it is strided
  char* target;
  uint32_t units;
  uint32_t first; // of its units, counted in its box
  uint32_t dim;   // where the dims of its box start, counted in those of the table
  uint8_t dims;   // of its box; 0 if its units follow one another
  uint8_t width;  // bytes of a unit; numbers of one that converts
  Number from, to;
};

// One dim of a strided box.
struct alignas(16) Dim {
  int64_t source_stride, target_stride; // bytes
  Divider size;                         // in units
};

// A table is an array of these: chunks, then dims, innermost first. A warp needs one round trip to memory for a chunk,
// by two loads that do not wait for each other, and another one for dims.
struct Record {
  Word16 halves[2];

  template <typename Part>
  EPLOAD_HD Part as() const {
    static_assert(sizeof(Part) == sizeof(Record), "all parts of a table have one size");
    const Word16 both[2] = {halves[0], halves[1]};
    Part part;
    memcpy(&part, both, sizeof part);
    return part;
  }
};

// What the device refuses and a host would not notice; for tests.
#ifndef __CUDA_ARCH__
inline thread_local bool misaligned = false;
#endif

// Loads and stores of memory that is the device's own: the pointers come from a table, which hides it.
template <typename Word>
EPLOAD_HD Word load(const Word* from) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(from));
  return *from;
#else
  misaligned |= reinterpret_cast<uintptr_t>(from) % sizeof(Word) != 0;
  Word v;
  std::memcpy(&v, from, sizeof v);
  return v;
#endif
}

template <typename Word>
EPLOAD_HD void store(Word* to, const Word& v) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(to));
  *to = v;
#else
  misaligned |= reinterpret_cast<uintptr_t>(to) % sizeof(Word) != 0;
  std::memcpy(to, &v, sizeof v);
#endif
}

template <int kBytes>
using WordOf = std::conditional_t<
    kBytes == 16,
    Word16,
    std::conditional_t<
        kBytes == 8,
        uint64_t,
        std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

// Where kCount units of a strided chunk lie, the first at index `unit` of its box and the others kLanes apart. Those
// past the chunk's end get places too, which must not be used.
template <uint32_t kCount>
struct Places {
  int64_t source[kCount], target[kCount]; // bytes from the box's first ones

  EPLOAD_HD Places(const Chunk& chunk, const Record* dims, uint32_t unit) {
    uint32_t left[kCount];
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      left[k] = unit + k * kLanes;
      source[k] = target[k] = 0;
    }
    const uint32_t last = chunk.dim + chunk.dims - 1;
    EPLOAD_NO_UNROLL
    for (uint32_t d = chunk.dim; d < last; ++d) {
      const Dim dim = dims[d].as<Dim>();
      EPLOAD_UNROLL
      for (uint32_t k = 0; k < kCount; ++k) {
        const uint32_t quotient = dim.size.divide(left[k]);
        const auto at = static_cast<int64_t>(left[k] - quotient * dim.size.divisor);
        source[k] += at * dim.source_stride;
        target[k] += at * dim.target_stride;
        left[k] = quotient;
      }
    }
    const Dim outer = dims[last].as<Dim>();
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      source[k] += left[k] * outer.source_stride;
      target[k] += left[k] * outer.target_stride;
    }
  }
};

// Calls body(first unit, how many of kCount units, kLanes apart, are there) for what one lane has to do in a chunk.
template <uint32_t kCount, typename Body>
EPLOAD_HD void for_lane(const Chunk& chunk, uint32_t lane, const Body& body) {
  EPLOAD_NO_UNROLL
  for (uint32_t unit = lane; unit < chunk.units; unit += kCount * kLanes) {
    body(unit, (chunk.units - unit + kLanes - 1) / kLanes);
  }
}

// kCount units are in flight for each lane: `at(k)` says where one comes from and where it goes to.
template <int kWidth, uint32_t kCount, typename Source, typename Target>
EPLOAD_HD void move(uint32_t there, const Source& source, const Target& target) {
  using Word = WordOf<kWidth>;
  Word words[kCount] = {};
  EPLOAD_UNROLL
  for (uint32_t k = 0; k < kCount; ++k) {
    if (k < there) {
      words[k] = load(reinterpret_cast<const Word*>(source(k)));
    }
  }
  EPLOAD_UNROLL
  for (uint32_t k = 0; k < kCount; ++k) {
    if (k < there) {
      store(reinterpret_cast<Word*>(target(k)), words[k]);
    }
  }
}

template <int kWidth>
EPLOAD_HD void copy_units(const Chunk& chunk, const Record* dims, uint32_t lane) {
  if (chunk.dims == 0) {
    for_lane<8>(chunk, lane, [&](uint32_t unit, uint32_t there) {
      const char* const source = chunk.source + unit * kWidth;
      char* const target = chunk.target + unit * kWidth;
      constexpr uint32_t kStep = kLanes * kWidth;
      move<kWidth, 8>(
          there, [&](uint32_t k) { return source + k * kStep; }, [&](uint32_t k) { return target + k * kStep; });
    });
    return;
  }
  for_lane<4>(chunk, lane, [&](uint32_t unit, uint32_t there) { // more in flight cost registers, and so warps
    const Places<4> at(chunk, dims, chunk.first + unit);
    move<kWidth, 4>(
        there,
        [&](uint32_t k) { return chunk.source + at.source[k]; },
        [&](uint32_t k) { return chunk.target + at.target[k]; });
  });
}

// kNumbers numbers of one format, moved in the widest words that they fill.
template <Number kNumber, int kNumbers>
struct Pack {
  using Format = FormatOf<kNumber>;
  using Bits = typename Format::Bits;
  static constexpr int kBytes = kNumbers * static_cast<int>(sizeof(Bits));
  static constexpr int kWord = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWord;
  using Word = WordOf<kWord>;

  static EPLOAD_HD void read(const char* from, float (&values)[kNumbers]) {
    Word words[kWords];
    Bits bits[kNumbers];
    EPLOAD_UNROLL
    for (int w = 0; w < kWords; ++w) {
      words[w] = load(reinterpret_cast<const Word*>(from) + w);
    }
    memcpy(bits, words, kBytes);
    EPLOAD_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      values[i] = Format::decode(bits[i]);
    }
  }

  static EPLOAD_HD void write(char* to, const float (&values)[kNumbers]) {
    Word words[kWords];
    Bits bits[kNumbers];
    EPLOAD_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      bits[i] = Format::encode(values[i]);
    }
    memcpy(words, bits, kBytes);
    EPLOAD_UNROLL
    for (int w = 0; w < kWords; ++w) {
      store(reinterpret_cast<Word*>(to) + w, words[w]);
    }
  }
};

// Calls body(format) for the format that is only known at run time; all lanes of a warp take one way.
template <typename Body>
EPLOAD_HD void with_number(Number number, const Body& body) {
  switch (number) {
    case Number::kBFloat16:
      return body(std::integral_constant<Number, Number::kBFloat16>());
    case Number::kHalf:
      return body(std::integral_constant<Number, Number::kHalf>());
    case Number::kFloat:
      return body(std::integral_constant<Number, Number::kFloat>());
    case Number::kDouble:
      return body(std::integral_constant<Number, Number::kDouble>());
    case Number::kFloat8E4M3:
      return body(std::integral_constant<Number, Number::kFloat8E4M3>());
    case Number::kFloat8E4M3Clamped:
      return body(std::integral_constant<Number, Number::kFloat8E4M3Clamped>());
    case Number::kFloat8E5M2:
      return body(std::integral_constant<Number, Number::kFloat8E5M2>());
    default:
      return;
  }
}

// kCount units of kNumbers numbers each go through float32. As an array that costs one code path a format rather than
// one a pair of formats.
template <uint32_t kCount, int kNumbers>
EPLOAD_HD void convert_units(const Chunk& chunk, const Record* dims, uint32_t lane) {
  for_lane<kCount>(chunk, lane, [&](uint32_t unit, uint32_t there) {
    const Places<kCount> at(chunk, dims, chunk.first + unit);
    float values[kCount][kNumbers];
    with_number(chunk.from, [&](auto number) {
      EPLOAD_UNROLL
      for (uint32_t k = 0; k < kCount; ++k) {
        if (k < there) {
          Pack<decltype(number)::value, kNumbers>::read(chunk.source + at.source[k], values[k]);
        }
      }
    });
    with_number(chunk.to, [&](auto number) {
      EPLOAD_UNROLL
      for (uint32_t k = 0; k < kCount; ++k) {
        if (k < there) {
          Pack<decltype(number)::value, kNumbers>::write(chunk.target + at.target[k], values[k]);
        }
      }
    });
  });
}

// One lane's part of one chunk. kConvert: whether any chunk of the table converts; without, the code is smaller.
template <bool kConvert>
EPLOAD_HD void run_chunk(const Chunk& chunk, const Record* dims, uint32_t lane) {
  if constexpr (kConvert) {
    if (chunk.from != Number::kNone) {
      return chunk.width == kVector ? convert_units<2, kVector>(chunk, dims, lane)
                                    : convert_units<4, 1>(chunk, dims, lane);
    }
  }
  switch (chunk.width) {
    case 16:
      return copy_units<16>(chunk, dims, lane);
    case 8:
      return copy_units<8>(chunk, dims, lane);
    case 4:
      return copy_units<4>(chunk, dims, lane);
    case 2:
      return copy_units<2>(chunk, dims, lane);
    default:
      return copy_units<1>(chunk, dims, lane);
  }
}

} // namespace epload::cuda
