// The batched copy as a table of regions and equal chunks of them, and the work of one lane of a warp on one chunk.
// This is the whole of the kernel but its launch, and compiles for the host too, where tests run it over plain memory.
#pragma once

#include "float_formats.h"

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

// One strided box. It is moved in units, each contiguous on both sides: `width` bytes (16, 8, 4, 2 or 1) where nothing
// is converted, else kVector numbers or one.
struct Region {
  const char* source;
  char* target;
  uint32_t units;
  uint8_t dims;
  uint8_t width;                                      // bytes of a unit; 0 for a region that converts
  Number from, to;                                    // of a region that converts
  uint32_t vector;                                    // numbers in a unit of a region that converts: kVector or 1
  Divider size[kDims];                                // in units, innermost first
  int64_t source_stride[kDims], target_stride[kDims]; // bytes
};

// Units [index * kChunkUnits, + kChunkUnits) of a region, as far as it has them.
struct Chunk {
  uint32_t region, index;
};

struct alignas(16) Word16 {
  uint32_t part[4];
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
struct WordOf;
template <>
struct WordOf<16> {
  using type = Word16;
};
template <>
struct WordOf<8> {
  using type = uint64_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<1> {
  using type = uint8_t;
};

// Where kCount units of a region lie, the first at index `unit` and the others kLanes apart. Those past the region's
// end get places too, which must not be used.
template <uint32_t kCount>
struct Places {
  int64_t source[kCount], target[kCount]; // bytes from the region's first ones

  EPLOAD_HD Places(const Region& region, uint32_t unit) {
    uint32_t left[kCount];
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      left[k] = unit + k * kLanes;
      source[k] = target[k] = 0;
    }
    const int last = region.dims - 1;
    EPLOAD_NO_UNROLL
    for (int d = 0; d < last; ++d) {
      const Divider size = region.size[d];
      const int64_t source_stride = region.source_stride[d], target_stride = region.target_stride[d];
      EPLOAD_UNROLL
      for (uint32_t k = 0; k < kCount; ++k) {
        const uint32_t quotient = size.divide(left[k]);
        const auto at = static_cast<int64_t>(left[k] - quotient * size.divisor);
        source[k] += at * source_stride;
        target[k] += at * target_stride;
        left[k] = quotient;
      }
    }
    const int64_t source_stride = region.source_stride[last], target_stride = region.target_stride[last];
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      source[k] += left[k] * source_stride;
      target[k] += left[k] * target_stride;
    }
  }
};

// Calls body(first unit, how many of kCount units, kLanes apart, are there) for what one lane has to do in a chunk.
template <uint32_t kCount, typename Body>
EPLOAD_HD void for_lane(const Region& region, uint32_t index, uint32_t lane, const Body& body) {
  const uint32_t begin = index * kChunkUnits;
  const uint32_t end = region.units - begin < kChunkUnits ? region.units : begin + kChunkUnits;
  for (uint32_t unit = begin + lane; unit < end; unit += kCount * kLanes) {
    body(unit, (end - unit + kLanes - 1) / kLanes);
  }
}

template <int kWidth>
EPLOAD_HD void copy_units(const Region& region, uint32_t index, uint32_t lane) {
  using Word = typename WordOf<kWidth>::type;
  constexpr uint32_t kCount = 4; // loads in flight; more cost registers, and so warps
  for_lane<kCount>(region, index, lane, [&](uint32_t unit, uint32_t there) {
    const Places<kCount> at(region, unit);
    Word words[kCount];
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      if (k < there) {
        words[k] = load(reinterpret_cast<const Word*>(region.source + at.source[k]));
      }
    }
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      if (k < there) {
        store(reinterpret_cast<Word*>(region.target + at.target[k]), words[k]);
      }
    }
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
  using Word = typename WordOf<kWord>::type;

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

// Calls body.template run<format>() for the format that is only known at run time; all lanes of a warp take one way.
template <typename Body>
EPLOAD_HD void with_number(Number number, const Body& body) {
  switch (number) {
    case Number::kBFloat16:
      return body.template run<Number::kBFloat16>();
    case Number::kHalf:
      return body.template run<Number::kHalf>();
    case Number::kFloat:
      return body.template run<Number::kFloat>();
    case Number::kDouble:
      return body.template run<Number::kDouble>();
    case Number::kFloat8E4M3:
      return body.template run<Number::kFloat8E4M3>();
    case Number::kFloat8E4M3Clamped:
      return body.template run<Number::kFloat8E4M3Clamped>();
    case Number::kFloat8E5M2:
      return body.template run<Number::kFloat8E5M2>();
    default:
      return;
  }
}

// kCount units of kNumbers numbers each, between memory and float32. Going through float32 as an array costs one code
// path a format rather than one a pair of formats.
template <uint32_t kCount, int kNumbers>
struct Reader {
  const Region& region;
  const Places<kCount>& at;
  uint32_t there;
  float (&values)[kCount][kNumbers];

  template <Number kNumber>
  EPLOAD_HD void run() const {
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      if (k < there) {
        Pack<kNumber, kNumbers>::read(region.source + at.source[k], values[k]);
      }
    }
  }
};

template <uint32_t kCount, int kNumbers>
struct Writer {
  const Region& region;
  const Places<kCount>& at;
  uint32_t there;
  const float (&values)[kCount][kNumbers];

  template <Number kNumber>
  EPLOAD_HD void run() const {
    EPLOAD_UNROLL
    for (uint32_t k = 0; k < kCount; ++k) {
      if (k < there) {
        Pack<kNumber, kNumbers>::write(region.target + at.target[k], values[k]);
      }
    }
  }
};

template <uint32_t kCount, int kNumbers>
EPLOAD_HD void convert_units(const Region& region, uint32_t index, uint32_t lane) {
  for_lane<kCount>(region, index, lane, [&](uint32_t unit, uint32_t there) {
    const Places<kCount> at(region, unit);
    float values[kCount][kNumbers];
    with_number(region.from, Reader<kCount, kNumbers>{region, at, there, values});
    with_number(region.to, Writer<kCount, kNumbers>{region, at, there, values});
  });
}

// One lane's part of one chunk. kConvert: whether any region of the table converts; without, the code is smaller.
template <bool kConvert>
EPLOAD_HD void run_chunk(const Region* regions, Chunk chunk, uint32_t lane) {
  const Region& region = regions[chunk.region];
  switch (region.width) {
    case 16:
      return copy_units<16>(region, chunk.index, lane);
    case 8:
      return copy_units<8>(region, chunk.index, lane);
    case 4:
      return copy_units<4>(region, chunk.index, lane);
    case 2:
      return copy_units<2>(region, chunk.index, lane);
    case 1:
      return copy_units<1>(region, chunk.index, lane);
    default:
      break;
  }
  if constexpr (kConvert) {
    if (region.vector == kVector) {
      convert_units<2, kVector>(region, chunk.index, lane);
    } else {
      convert_units<4, 1>(region, chunk.index, lane);
    }
  }
}

} // namespace epload::cuda
