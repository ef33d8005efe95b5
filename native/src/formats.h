// How do bfloat16 and float16 become float32, and back? Portable, bit by bit; vector kernels have
// instructions for it. Rounds to the nearest, ties to even, as torch does.
#pragma once

#include <cstdint>
#include <cstring>

#include "ostinato_native.h"

namespace ost {

static inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of_bfloat16(uint16_t half) {
  return float_of_bits(static_cast<uint32_t>(half) << 16);
}

static inline uint16_t bfloat16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float float_of_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return float_of_bits(sign | ((rest << 13) + 0x38000000u));
  const float value = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24, exact
  return sign ? -value : value;
}

static inline uint16_t float16_of_float(float value) {
  const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u;
  const uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16
  if (size < 0x38800000u) {  // below 2^-14: adding 2^-1 lines the bits up, the adder rounds
    const uint32_t sum = bits_of_float(float_of_bits(size) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - 0x3f000000u));
  }
  const uint32_t odd = size >> 13 & 1u;
  return static_cast<uint16_t>(sign | (size - 0x38000000u + 0xfffu + odd) >> 13);
}

// a * b + c, rounded once. A product of floats is exact in double; their sum is rounded to odd there, so
// that rounding it to float gives what a single rounding does.
// Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Transactions on Computers
// 57(4), 2008.
static inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, sum = product + c, part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const bool is_inexact = error > 0 || error < 0;  // neither of what is no number
  const int64_t away = (error > 0) == (sum > 0) ? 1 : -1;
  bits += is_inexact && (bits & 1) == 0 ? away : 0;
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
#endif
}

static inline int64_t bytes_of(int32_t dtype) {
  return dtype == OST_FLOAT32 ? 4 : dtype == OST_KV_INT8 ? 1 : 2;
}

static inline float load_element(const void *data, int32_t dtype, int64_t index) {
  if (dtype == OST_FLOAT32) return static_cast<const float *>(data)[index];
  const uint16_t half = static_cast<const uint16_t *>(data)[index];
  return dtype == OST_BFLOAT16 ? float_of_bfloat16(half) : float_of_float16(half);
}

static inline void store_element(void *data, int32_t dtype, int64_t index, float value) {
  if (dtype == OST_FLOAT32) {
    static_cast<float *>(data)[index] = value;
    return;
  }
  const bool brain = dtype == OST_BFLOAT16;
  static_cast<uint16_t *>(data)[index] = brain ? bfloat16_of_float(value) : float16_of_float(value);
}

}  // namespace ost
