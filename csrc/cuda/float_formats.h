// Float formats and the conversions between them, with the rounding of Tensor.copy_: through float32, to nearest even.
// For host and device alike; knows neither torch nor CUDA's own types.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define EPLOAD_HD __host__ __device__ __forceinline__
#else
#define EPLOAD_HD inline
#endif

namespace epload::cuda {

// kFloat8E4M3Clamped holds the same numbers as kFloat8E4M3; what is too large becomes the largest rather than NaN.
enum class Number : uint8_t { kNone, kBFloat16, kHalf, kFloat, kDouble, kFloat8E4M3, kFloat8E4M3Clamped, kFloat8E5M2 };

enum class Overflow : uint8_t { kInfinity, kNaN, kLargest }; // what a number becomes that is too large

EPLOAD_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

EPLOAD_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A float format of one sign bit, kExponent and kMantissa bits, narrower than float32. Where overflow gives infinity
// the top exponent means infinity and NaN, as in IEEE 754; else only the code of all ones is NaN (e4m3fn).
template <typename BitsType, int kExponent, int kMantissa, Overflow kOverflow>
struct Small {
  using Bits = BitsType;

  static constexpr bool kInfinity = kOverflow == Overflow::kInfinity;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static constexpr uint32_t kTop = ((1u << kExponent) - 1) << kMantissa; // the top exponent
  static constexpr uint32_t kTooLarge = kInfinity ? kTop : kMagnitude - (kOverflow == Overflow::kLargest);
  static constexpr uint32_t kNaN = kInfinity ? kTop | (1u << (kMantissa - 1)) : kMagnitude;
  static constexpr uint32_t kFloatInfinity = 0xffu << 23;
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;

  static EPLOAD_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 31) << (kExponent + kMantissa);
    uint32_t code;
    if (magnitude > kFloatInfinity) {
      code = kNaN;
    } else if (magnitude >= kSmallestNormal) {
      const uint32_t even = (magnitude >> kDropped) & 1;
      code = ((magnitude + (1u << (kDropped - 1)) - 1 + even) >> kDropped) -
             (static_cast<uint32_t>(127 - kBias) << kMantissa);
      code = code > kTooLarge ? kTooLarge : code;
    } else if constexpr (kExponent == 8) { // float32's own subnormals: the same exponents, fewer mantissa bits
      const uint32_t even = (magnitude >> kDropped) & 1;
      code = (magnitude + (1u << (kDropped - 1)) - 1 + even) >> kDropped;
    } else {
      // Adding a power of two whose last place is worth our subnormals' unit lets the adder round.
      constexpr uint32_t kRounder = static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23;
      code = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
    }
    return static_cast<Bits>(sign | code);
  }

  static EPLOAD_HD float decode(Bits stored) {
    const uint32_t code = stored & kMagnitude;
    const uint32_t sign = static_cast<uint32_t>(stored >> (kExponent + kMantissa)) << 31;
    uint32_t bits = code << kDropped;
    if constexpr (kExponent < 8) {
      // Read as a float32 the code has the wrong bias; the product mends it, for subnormals too.
      bits = bits_of(float_of(bits) * float_of(static_cast<uint32_t>(127 + 127 - kBias) << 23));
      if (kInfinity ? code >= kTop : code == kMagnitude) {
        bits = kFloatInfinity | (kInfinity ? (code & ~kTop) << kDropped : 1u << 22);
      }
    }
    return float_of(sign | bits);
  }
};

// float32 itself, and float64.
template <typename BitsType>
struct Wide {
  using Bits = BitsType;

  static EPLOAD_HD Bits encode(float value) {
    return value;
  }
  static EPLOAD_HD float decode(Bits stored) {
    return static_cast<float>(stored);
  }
};

template <Number>
struct FormatOf;
template <>
struct FormatOf<Number::kBFloat16> : Small<uint16_t, 8, 7, Overflow::kInfinity> {};
template <>
struct FormatOf<Number::kHalf> : Small<uint16_t, 5, 10, Overflow::kInfinity> {};
template <>
struct FormatOf<Number::kFloat> : Wide<float> {};
template <>
struct FormatOf<Number::kDouble> : Wide<double> {};
template <>
struct FormatOf<Number::kFloat8E4M3> : Small<uint8_t, 4, 3, Overflow::kNaN> {};
template <>
struct FormatOf<Number::kFloat8E4M3Clamped> : Small<uint8_t, 4, 3, Overflow::kLargest> {};
template <>
struct FormatOf<Number::kFloat8E5M2> : Small<uint8_t, 5, 2, Overflow::kInfinity> {};

} // namespace epload::cuda
