// A vector of 16 floats under AVX-512 (F, BW, DQ, VL): one register. See simd/generic.h.
#pragma once

#include <immintrin.h>

#include "simd/formats.h"

namespace ost {
namespace {

struct Vec {
  __m512 v;
};

inline Vec fill(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline Vec operator+(Vec x, Vec y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm512_div_ps(x.v, y.v)}; }
inline Vec multiply_add(Vec x, Vec y, Vec z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline Vec add_plain_product(Vec x, Vec y, Vec z) { return multiply_add(x, y, z); }
inline Vec larger(Vec x, Vec y) { return {_mm512_max_ps(x.v, y.v)}; }
inline Vec smaller(Vec x, Vec y) { return {_mm512_min_ps(x.v, y.v)}; }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x.v); }
inline float total(Vec x) { return _mm512_reduce_add_ps(x.v); }
inline Vec keep_lanes(Vec x, int first, int last, Vec other) {
  const uint32_t below = last >= 16 ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
  const uint32_t cut = first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below & ~cut), other.v, x.v)};
}

inline Vec whole_part(Vec x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
// 0 below the smallest float, as elsewhere.
inline Vec scale_by_power(Vec x, Vec whole) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(whole.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(is_normal, x.v, whole.v)};
}

inline __m512 float_of_words(__m512i words) { return _mm512_castsi512_ps(words); }
inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
  const __m512i words = _mm512_loadu_si512(p);
  first = {float_of_words(_mm512_slli_epi32(words, 16))};
  second = {float_of_words(
      _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Vec load_bfloat16(const uint16_t *p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return {float_of_words(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline Vec load_float16(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
// Rounded to the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(uint16_t *p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i words = _mm512_srli_epi32(_mm512_mask_mov_epi32(sum, is_nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(words));
}
inline void store_float16(uint16_t *p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x.v, 0));
}

inline void turn_words(const uint32_t *const *rows, uint32_t *out) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: columns c, c + 4, ... of rows i..i + 3
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 low0 = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);
    const __m512 low1 = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88);
    const __m512 high0 = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xdd);
    const __m512 high1 = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xdd);
    _mm512_storeu_ps(out + c * 16, _mm512_shuffle_f32x4(low0, low1, 0x88));
    _mm512_storeu_ps(out + (c + 4) * 16, _mm512_shuffle_f32x4(high0, high1, 0x88));
    _mm512_storeu_ps(out + (c + 8) * 16, _mm512_shuffle_f32x4(low0, low1, 0xdd));
    _mm512_storeu_ps(out + (c + 12) * 16, _mm512_shuffle_f32x4(high0, high1, 0xdd));
  }
}

}  // namespace
}  // namespace ost
