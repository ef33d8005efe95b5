// Codes of a weight as pairs of integers in vectors, by instruction set; see simd/int16.h for pairs and sums.
#pragma once

#include <cmath>
#include <cstring>

#include "simd/simd.h"
// after it
#include "simd/int16.h"

namespace ost {
namespace {

// The sums of so many rows with a tile fit the registers, beside what becomes of codes on the way.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kNibbleRows = 8, kRowsOfWholeTiles = 12;
#if defined(__AVX512VNNI__)
constexpr int kHalvesRows = 8, kWholeHalvesRows = 8;
#else
constexpr int kHalvesRows = 12, kWholeHalvesRows = 12;
#endif

inline Ints all_of(int32_t value) {
  return {reinterpret_cast<SixteenInts>(_mm512_set1_epi32(value))};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(from), 4 * kNibble);
  return {kNibble == 3 ? words : _mm512_and_si512(words, _mm512_set1_epi16(15))};
}
inline Pairs look_up(const uint8_t *table, Pairs places) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), places.v)};
}
// The low or high halves of bytes.
template <int kHalf>
inline Pairs load_halves(const char *from) {
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from), 4 * kHalf), _mm512_set1_epi8(15))};
}
inline Vec first_of(Pairs pairs) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs.v, 16), 16))};
}
inline Vec second_of(Pairs pairs) { return {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs.v, 16))}; }
inline Ints less(Ints sums, const int8_t *zeros, int32_t times) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros)));
  return {sums.v - reinterpret_cast<SixteenInts>(wide) * times};
}
#if defined(__AVX512VNNI__)
// Four neighbouring inputs of 16 outputs as bytes, which have no sign; rows have one.
#define OST_QUADS
inline Pairs load_quads(const char *from) { return {_mm512_loadu_si512(from)}; }
inline void store_quads(char *to, Pairs quads) { _mm512_storeu_si512(to, quads.v); }
inline Pairs quads_of(Pairs first, Pairs second, int16_t more) {
  const __m512i add = _mm512_set1_epi16(more), low = _mm512_set1_epi32(0xffff);
  const __m512i a = _mm512_add_epi16(first.v, add), b = _mm512_add_epi16(second.v, add);
  const __m512i ab = _mm512_or_si512(a, _mm512_srli_epi32(a, 8));
  const __m512i cd = _mm512_or_si512(b, _mm512_srli_epi32(b, 8));
  return {_mm512_or_si512(_mm512_and_si512(ab, low), _mm512_slli_epi32(cd, 16))};
}
inline Ints add_quads(Ints sums, Pairs weights, Pairs inputs) {
  const __m512i bits = reinterpret_cast<__m512i>(sums.v);
  return {reinterpret_cast<SixteenInts>(_mm512_dpbusd_epi32(bits, weights.v, inputs.v))};
}
#endif
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kNibbleRows = 6, kRowsOfWholeTiles = 3;
constexpr int kHalvesRows = 6, kWholeHalvesRows = 3;

inline Ints all_of(int32_t value) {
  const auto all = reinterpret_cast<EightInts>(_mm256_set1_epi32(value));
  return {all, all};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const auto *words = reinterpret_cast<const __m256i *>(from);
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words), 4 * kNibble), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words + 1), 4 * kNibble), mask)};
}
inline Pairs look_up(const uint8_t *table, Pairs places) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  const __m256i both = _mm256_broadcastsi128_si256(numbers);
  return {_mm256_shuffle_epi8(both, places.a), _mm256_shuffle_epi8(both, places.b)};
}
template <int kHalf>
inline Pairs load_halves(const char *from) {
  const auto *words = reinterpret_cast<const __m256i *>(from);
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words), 4 * kHalf), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words + 1), 4 * kHalf), mask)};
}
inline Vec first_of(Pairs pairs) {
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs.a, 16), 16)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs.b, 16), 16))};
}
inline Vec second_of(Pairs pairs) {
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs.a, 16)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs.b, 16))};
}
inline Ints less(Ints sums, const int8_t *zeros, int32_t times) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros));
  return {sums.a - reinterpret_cast<EightInts>(_mm256_cvtepi8_epi32(bytes)) * times,
          sums.b - reinterpret_cast<EightInts>(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))) * times};
}
#elif defined(OST_WITH_NEON)
constexpr int kMaxRows = 4, kNibbleRows = 4, kRowsOfWholeTiles = 2;

inline Ints all_of(int32_t value) {
  return each_of_four<Ints>([=](int) { return vdupq_n_s32(value); });
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const auto *words = reinterpret_cast<const uint16_t *>(from);
  return each_of_four<Pairs>([=](int k) {
    const uint16x8_t moved = vshlq_u16(vld1q_u16(words + 8 * k), vdupq_n_s16(-4 * kNibble));
    return vreinterpretq_s16_u16(vandq_u16(moved, vdupq_n_u16(15)));
  });
}
inline Pairs look_up(const uint8_t *table, const Pairs &places) {
  const uint8x16_t numbers = vld1q_u8(table);
  return each_of_four<Pairs>([&](int k) {
    return vreinterpretq_s16_u8(vqtbl1q_u8(numbers, vreinterpretq_u8_s16(places.v[k])));
  });
}
inline Vec first_of(const Pairs &pairs) {
  return each_register([&](int k) {
    const int32x4_t words = vreinterpretq_s32_s16(pairs.v[k]);
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 16), 16));
  });
}
inline Vec second_of(const Pairs &pairs) {
  return each_register([&](int k) {
    return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_s16(pairs.v[k]), 16));
  });
}
inline Ints less(const Ints &sums, const int8_t *zeros, int32_t times) {
  const int16x8_t halves[2] = {vmovl_s8(vld1_s8(zeros)), vmovl_s8(vld1_s8(zeros + 8))};
  return each_of_four<Ints>([&](int k) {
    const int16x8_t half = halves[k / 2];
    const int32x4_t wide = k % 2 ? vmovl_high_s16(half) : vmovl_s16(vget_low_s16(half));
    return vmlsq_n_s32(sums.v[k], wide, times);
  });
}
#else
constexpr int kMaxRows = 2, kNibbleRows = 2, kRowsOfWholeTiles = 1;

inline Ints all_of(int32_t value) {
  Ints sums;
  for (int32_t &sum : sums.v) sum = value;
  return sums;
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  uint16_t words[32];
  std::memcpy(words, from, sizeof words);
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = static_cast<int16_t>(words[i] >> 4 * kNibble & 15);
  return pairs;
}
inline Pairs look_up(const uint8_t *table, Pairs places) {
  for (int16_t &place : places.v) place = table[place];
  return places;
}
inline Vec first_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i]); });
}
inline Vec second_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i + 1]); });
}
inline Ints less(Ints sums, const int8_t *zeros, int32_t times) {
  for (int i = 0; i < 16; ++i) sums.v[i] -= zeros[i] * times;
  return sums;
}
#endif

inline Pairs load_bytes(const char *from) { return load_codes(reinterpret_cast<const int8_t *>(from)); }

}  // namespace
}  // namespace ost
