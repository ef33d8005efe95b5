// A vector of 16 floats under AVX2, FMA and F16C: two registers. See simd/generic.h.
#pragma once

#include <immintrin.h>

#include "simd/formats.h"

namespace ost {
namespace {

struct Vec {
  __m256 a, b;
};

inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec multiply_add(Vec x, Vec y, Vec z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vec add_plain_product(Vec x, Vec y, Vec z) { return multiply_add(x, y, z); }
inline Vec larger(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec smaller(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline float largest(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float total(Vec x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline __m256 lanes_between(__m256i lanes, int first, int last) {
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lanes);
  const __m256i above = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(first - 1));
  return _mm256_castsi256_ps(_mm256_and_si256(below, above));
}
inline Vec keep_lanes(Vec x, int first, int last, Vec other) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  return {_mm256_blendv_ps(other.a, x.a, lanes_between(low, first, last)),
          _mm256_blendv_ps(other.b, x.b, lanes_between(high, first, last))};
}

inline Vec whole_part(Vec x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline __m256 scale_by_power(__m256 x, __m256 whole) {
  const __m256 is_normal = _mm256_cmp_ps(whole, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(power)), is_normal);
}
inline Vec scale_by_power(Vec x, Vec whole) {
  return {scale_by_power(x.a, whole.a), scale_by_power(x.b, whole.b)};
}

inline __m256 float_of_words(__m256i words) { return _mm256_castsi256_ps(words); }
inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16));
  const __m256i top = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  first = {float_of_words(_mm256_slli_epi32(low, 16)), float_of_words(_mm256_slli_epi32(high, 16))};
  second = {float_of_words(_mm256_and_si256(low, top)), float_of_words(_mm256_and_si256(high, top))};
}
inline __m256 load_eight_bfloat16(const uint16_t *p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return float_of_words(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load_bfloat16(const uint16_t *p) {
  return {load_eight_bfloat16(p), load_eight_bfloat16(p + 8)};
}
inline Vec load_float16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)))};
}
// Rounded to the nearest, ties to even; a NaN stays one.
inline __m256i bfloat16_words(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, is_nan), 16);
}
inline void store_bfloat16(uint16_t *p, Vec x) {
  const __m256i packed = _mm256_packus_epi32(bfloat16_words(x.a), bfloat16_words(x.b));
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), ordered);
}
inline void store_float16(uint16_t *p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 8), _mm256_cvtps_ph(x.b, 0));
}

// One quarter of turn_words: 8 rows, 8 columns.
inline void turn_eight(const uint32_t *const *rows, int column, uint32_t *out) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float *>(rows[i] + column));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  float *to = reinterpret_cast<float *>(out + column * 16);
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
inline void turn_words(const uint32_t *const *rows, uint32_t *out) {
  for (int half = 0; half < 16; half += 8)
    for (int column = 0; column < 16; column += 8) turn_eight(rows + half, column, out + half);
}

}  // namespace
}  // namespace ost
