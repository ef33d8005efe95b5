// Integers of a row and codes of a weight in vectors, by instruction set.
#pragma once

#include <cmath>
#include <cstring>

#include "simd.h"

namespace ost {
namespace {

// Pairs: two neighbouring inputs of 16 outputs, 16 bits each. Sums: 32 bits of 16 outputs. The sums
// of so many rows with a tile fit the registers, beside what becomes of codes on the way.
#if defined(__AVX512F__)
constexpr int kByteRows = 8, kNibbleRows = 6, kRowsOfWholeTiles = 8;
struct Pairs {
  __m512i v;
};
using Sums = Pairs;

inline Sums all_of(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline Pairs load_bytes(const char *from) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)))};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(from), 4 * kNibble);
  return {kNibble == 3 ? words : _mm512_and_si512(words, _mm512_set1_epi16(15))};
}
inline Sums add_products(Sums sums, Pairs weights, Pairs inputs) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(sums.v, weights.v, inputs.v)};
#else
  return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(weights.v, inputs.v))};
#endif
}
inline Vec floats(Sums sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
inline Vec first_of(Pairs pairs) {
  return floats({_mm512_srai_epi32(_mm512_slli_epi32(pairs.v, 16), 16)});
}
inline Vec second_of(Pairs pairs) { return floats({_mm512_srai_epi32(pairs.v, 16)}); }
inline void store_integers(int16_t *to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
inline Sums less(Sums sums, const int8_t *zeros, int32_t times) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros)));
  return {_mm512_sub_epi32(sums.v, _mm512_mullo_epi32(wide, _mm512_set1_epi32(times)))};
}
#if defined(__AVX512VNNI__)
// Four neighbouring inputs of 16 outputs as bytes, which have no sign; rows have one.
#define OST_QUADS
inline Pairs quads_of(Pairs first, Pairs second, int16_t more) {
  const __m512i add = _mm512_set1_epi16(more), low = _mm512_set1_epi32(0xffff);
  const __m512i a = _mm512_add_epi16(first.v, add), b = _mm512_add_epi16(second.v, add);
  const __m512i ab = _mm512_or_si512(a, _mm512_srli_epi32(a, 8));
  const __m512i cd = _mm512_or_si512(b, _mm512_srli_epi32(b, 8));
  return {_mm512_or_si512(_mm512_and_si512(ab, low), _mm512_slli_epi32(cd, 16))};
}
inline Sums add_quads(Sums sums, Pairs weights, Pairs inputs) {
  return {_mm512_dpbusd_epi32(sums.v, weights.v, inputs.v)};
}
inline void store_integers(int8_t *to, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                   _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
#endif
#elif defined(__AVX2__)
constexpr int kByteRows = 4, kNibbleRows = 4, kRowsOfWholeTiles = 2;
struct Pairs {
  __m256i a, b;
};
using Sums = Pairs;

inline Sums all_of(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Pairs load_bytes(const char *from) {
  const auto *bytes = reinterpret_cast<const __m128i *>(from);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const auto *words = reinterpret_cast<const __m256i *>(from);
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words), 4 * kNibble), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words + 1), 4 * kNibble), mask)};
}
inline Sums add_products(Sums sums, Pairs weights, Pairs inputs) {
  return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(weights.a, inputs.a)),
          _mm256_add_epi32(sums.b, _mm256_madd_epi16(weights.b, inputs.b))};
}
inline Vec floats(Sums sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
inline Vec first_of(Pairs pairs) {
  return floats({_mm256_srai_epi32(_mm256_slli_epi32(pairs.a, 16), 16),
                 _mm256_srai_epi32(_mm256_slli_epi32(pairs.b, 16), 16)});
}
inline Vec second_of(Pairs pairs) {
  return floats({_mm256_srai_epi32(pairs.a, 16), _mm256_srai_epi32(pairs.b, 16)});
}
inline void store_integers(int16_t *to, Vec x) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(both, 0xd8));
}
inline Sums less(Sums sums, const int8_t *zeros, int32_t times) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros));
  const __m256i factor = _mm256_set1_epi32(times);
  const __m256i a = _mm256_mullo_epi32(_mm256_cvtepi8_epi32(bytes), factor);
  const __m256i b = _mm256_mullo_epi32(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)), factor);
  return {_mm256_sub_epi32(sums.a, a), _mm256_sub_epi32(sums.b, b)};
}
#else
constexpr int kByteRows = 2, kNibbleRows = 2, kRowsOfWholeTiles = 1;
struct Pairs {
  int16_t v[32];
};
struct Sums {
  int32_t v[16];
};

inline Sums all_of(int32_t value) {
  Sums sums;
  for (int32_t &sum : sums.v) sum = value;
  return sums;
}
inline Pairs load_bytes(const char *from) {
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = static_cast<signed char>(from[i]);
  return pairs;
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  uint16_t words[32];
  std::memcpy(words, from, sizeof words);
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = static_cast<int16_t>(words[i] >> 4 * kNibble & 15);
  return pairs;
}
inline Sums add_products(Sums sums, const Pairs &weights, const Pairs &inputs) {
  for (int i = 0; i < 16; ++i)
    sums.v[i] += weights.v[2 * i] * inputs.v[2 * i] + weights.v[2 * i + 1] * inputs.v[2 * i + 1];
  return sums;
}
inline Vec floats(const Sums &sums) {
  return each([&](int i) { return static_cast<float>(sums.v[i]); });
}
inline Vec first_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i]); });
}
inline Vec second_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i + 1]); });
}
inline void store_integers(int16_t *to, const Vec &x) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int16_t>(std::lrintf(x.v[i]));
}
inline Sums less(Sums sums, const int8_t *zeros, int32_t times) {
  for (int i = 0; i < 16; ++i) sums.v[i] -= zeros[i] * times;
  return sums;
}
#endif

#if !defined(__AVX512F__) && !defined(__AVX2__)
inline Pairs same_inputs(const int16_t *inputs) {
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = inputs[i % 2];
  return pairs;
}
#else
inline Pairs same_inputs(const void *inputs) {  // two of 16 bits, or four of 8
  int32_t all;
  std::memcpy(&all, inputs, sizeof all);
  return all_of(all);
}
#endif

}  // namespace
}  // namespace ost
