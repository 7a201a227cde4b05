// The dtypes that epload moves. Each is also a row of the table in core/dtypes.py; a test holds the two equal.
#pragma once

#include "cuda/float_formats.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>

namespace epload {

struct Dtype {
  at::ScalarType type;
  const char* name;                          // in torch
  cuda::Number number = cuda::Number::kNone; // if the CUDA kernel converts it
};

constexpr std::array kDtypes{
    Dtype{at::ScalarType::Byte, "uint8"},
    Dtype{at::ScalarType::Char, "int8"},
    Dtype{at::ScalarType::Short, "int16"},
    Dtype{at::ScalarType::Int, "int32"},
    Dtype{at::ScalarType::Long, "int64"},
    Dtype{at::ScalarType::UInt16, "uint16"},
    Dtype{at::ScalarType::UInt32, "uint32"},
    Dtype{at::ScalarType::UInt64, "uint64"},
    Dtype{at::ScalarType::Bool, "bool"},
    Dtype{at::ScalarType::Half, "float16", cuda::Number::kHalf},
    Dtype{at::ScalarType::BFloat16, "bfloat16", cuda::Number::kBFloat16},
    Dtype{at::ScalarType::Float, "float32", cuda::Number::kFloat},
    Dtype{at::ScalarType::Double, "float64", cuda::Number::kDouble},
    Dtype{at::ScalarType::ComplexHalf, "complex32"},
    Dtype{at::ScalarType::ComplexFloat, "complex64"},
    Dtype{at::ScalarType::ComplexDouble, "complex128"},
    Dtype{at::ScalarType::Float8_e5m2, "float8_e5m2", cuda::Number::kFloat8E5M2},
    Dtype{at::ScalarType::Float8_e4m3fn, "float8_e4m3fn", cuda::Number::kFloat8E4M3},
    Dtype{at::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz"},
    Dtype{at::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz"},
    Dtype{at::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu"},
};

// Null for a number that is no dtype of these.
inline const Dtype* find_dtype(int64_t code) {
  const auto* const found = std::find_if(
      kDtypes.begin(), kDtypes.end(), [code](const Dtype& row) { return static_cast<int64_t>(row.type) == code; });
  return found == kDtypes.end() ? nullptr : found;
}

inline const Dtype* find_dtype(at::ScalarType type) {
  return find_dtype(static_cast<int64_t>(type));
}

} // namespace epload
