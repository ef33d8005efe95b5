// A vector of 16 floats on any processor: loops of 16 turns, which the compiler translates to the
// instructions that every processor of the architecture has.
//
// Every simd/*.h offers the same names, and each attention/kernels_*.cpp includes exactly one of them. All is in
// an unnamed namespace: the linker must never mix code of two instruction sets.
#pragma once

#include <cmath>
#include <cstring>

#include "simd/formats.h"

namespace ost {
namespace {

struct Vec {
  float v[16];
};

template <class Function>
inline Vec each(Function function) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = function(i);
  return out;
}

inline Vec fill(float x) {
  return each([=](int) { return x; });
}
inline Vec load(const float *p) {
  return each([=](int i) { return p[i]; });
}
inline void store(float *p, const Vec &a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline Vec operator+(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
// a * b + c, rounded once, also where the processor has no instruction for it.
inline Vec multiply_add(const Vec &a, const Vec &b, const Vec &c) {
  Vec out;
  for (int i = 0; i < 16; i += 4) fused_multiply_add(a.v + i, b.v + i, c.v + i, out.v + i);
  return out;
}
// a * b + c of plain weights, keys and values, whose sums may differ between instruction sets: rounded
// twice where once takes many instructions.
inline Vec add_plain_product(const Vec &a, const Vec &b, const Vec &c) {
#if defined(__FP_FAST_FMAF)
  return multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vec larger(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec smaller(const Vec &a, const Vec &b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline float largest(const Vec &a) {
  float out = a.v[0];
  for (int i = 1; i < 16; ++i) out = a.v[i] > out ? a.v[i] : out;
  return out;
}
// Halves are added to halves, as vector instructions do.
inline float total(Vec a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
// Lanes first..last - 1 of a, and other elsewhere.
inline Vec keep_lanes(const Vec &a, int first, int last, const Vec &other) {
  return each([&](int i) { return i >= first && i < last ? a.v[i] : other.v[i]; });
}

// The largest whole number not above x, and 2 to it; 0 where that is below the smallest float,
// infinity where it is above the largest.
inline Vec whole_part(const Vec &x) {
  return each([&](int i) { return std::floor(x.v[i]); });
}
inline Vec scale_by_power(const Vec &a, const Vec &whole) {
  return each([&](int i) {
    if (whole.v[i] < -126.0f) return 0.0f;
    if (!(whole.v[i] <= 127.0f)) return a.v[i] * whole.v[i] * INFINITY;  // too large, or no number
    return a.v[i] * float_of_bits(static_cast<uint32_t>(static_cast<int32_t>(whole.v[i]) + 127)
                                  << 23);
  });
}

// 16 pairs of bfloat16: the first of each pair, and the second.
inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
  uint32_t words[16];  // of a little-endian processor: the first of a pair is the lower half
  std::memcpy(words, p, sizeof words);
  first = each([&](int i) { return float_of_bits(words[i] << 16); });
  second = each([&](int i) { return float_of_bits(words[i] & 0xffff0000u); });
}
inline Vec load_bfloat16(const uint16_t *p) {
  return each([=](int i) { return float_of_bfloat16(p[i]); });
}
inline Vec load_float16(const uint16_t *p) {
  return each([=](int i) { return float_of_float16(p[i]); });
}
inline void store_bfloat16(uint16_t *p, const Vec &a) {
  for (int i = 0; i < 16; ++i) p[i] = bfloat16_of_float(a.v[i]);
}
inline void store_float16(uint16_t *p, const Vec &a) {
  for (int i = 0; i < 16; ++i) p[i] = float16_of_float(a.v[i]);
}

// out[j][i] = rows[i][j]
inline void turn_words(const uint32_t *const *rows, uint32_t *out) {
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) out[j * 16 + i] = rows[i][j];
}

}  // namespace
}  // namespace ost
