// Converts bfloat16 and float16 to float32, and back. Portable, bit by bit; vector kernels have
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

// Four of each: vectors of the compiler's.
typedef float FourFloats __attribute__((vector_size(16)));
typedef double FourDoubles __attribute__((vector_size(32)));
typedef int64_t FourWords __attribute__((vector_size(32)));

// a * b + c, rounded once. A product of floats is exact in double; their sum is rounded to odd there, so
// that rounding it to float gives what a single rounding does. Of what is no number, neither sum is odd.
// Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Transactions on Computers
// 57(4), 2008.
static inline void fused_multiply_add(const float *a, const float *b, const float *c, float *out) {
#if defined(__FP_FAST_FMAF)
  for (int i = 0; i < 4; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
#else
  FourFloats fours[3];
  std::memcpy(&fours[0], a, 16);
  std::memcpy(&fours[1], b, 16);
  std::memcpy(&fours[2], c, 16);
  const FourDoubles first = __builtin_convertvector(fours[0], FourDoubles);
  const FourDoubles second = __builtin_convertvector(fours[1], FourDoubles);
  const FourDoubles addend = __builtin_convertvector(fours[2], FourDoubles);
  const FourDoubles product = first * second, sum = product + addend;
  const FourDoubles part = sum - product, error = (product - (sum - part)) + (addend - part);
  FourWords bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const FourWords is_above = error > 0.0, is_inexact = is_above | (error < 0.0);
  const FourWords is_even = (bits & 1) - 1, away = (~(is_above ^ (sum > 0.0)) & 2) - 1;
  bits += is_inexact & is_even & away;
  FourDoubles odd;
  std::memcpy(&odd, &bits, sizeof odd);
  const FourFloats rounded = __builtin_convertvector(odd, FourFloats);
  std::memcpy(out, &rounded, 16);
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
