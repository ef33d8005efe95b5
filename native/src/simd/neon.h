// Vectors of 16 floats of ARM's NEON: four registers. Sums add halves to halves, as AVX2 and AVX-512 do.
// See simd/generic.h.
#pragma once

#include <arm_neon.h>

#include "simd/formats.h"

namespace ost {
namespace {

struct Vec {
  float32x4_t v[4];
};

// function(k) for each register k.
template <class Function>
inline Vec each_register(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline Vec fill(float x) {
  return each_register([=](int) { return vdupq_n_f32(x); });
}
inline Vec load(const float *p) {
  return each_register([=](int k) { return vld1q_f32(p + 4 * k); });
}
inline void store(float *p, const Vec &x) {
  for (int k = 0; k < 4; ++k) vst1q_f32(p + 4 * k, x.v[k]);
}
inline Vec operator+(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return vaddq_f32(x.v[k], y.v[k]); });
}
inline Vec operator-(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return vsubq_f32(x.v[k], y.v[k]); });
}
inline Vec operator*(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return vmulq_f32(x.v[k], y.v[k]); });
}
inline Vec operator/(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return vdivq_f32(x.v[k], y.v[k]); });
}
inline Vec multiply_add(const Vec &x, const Vec &y, const Vec &z) {
  return each_register([&](int k) { return vfmaq_f32(z.v[k], x.v[k], y.v[k]); });
}
inline Vec add_plain_product(const Vec &x, const Vec &y, const Vec &z) { return multiply_add(x, y, z); }
// Comparisons, not FMAX and FMIN: where one is no number, the second is the answer, as on x86.
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline Vec larger(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return larger(x.v[k], y.v[k]); });
}
inline Vec smaller(const Vec &x, const Vec &y) {
  return each_register([&](int k) { return vbslq_f32(vcltq_f32(x.v[k], y.v[k]), x.v[k], y.v[k]); });
}
inline float largest(const Vec &x) {
  return vmaxvq_f32(larger(larger(x.v[0], x.v[2]), larger(x.v[1], x.v[3])));
}
inline float total(const Vec &x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline Vec keep_lanes(const Vec &x, int first, int last, const Vec &other) {
  static constexpr int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each_register([&](int k) {
    const int32x4_t lane = vld1q_s32(lanes + 4 * k);
    const uint32x4_t above = vcgeq_s32(lane, vdupq_n_s32(first));
    const uint32x4_t below = vcltq_s32(lane, vdupq_n_s32(last));
    return vbslq_f32(vandq_u32(above, below), x.v[k], other.v[k]);
  });
}

inline Vec whole_part(const Vec &x) {
  return each_register([&](int k) { return vrndmq_f32(x.v[k]); });
}
inline Vec scale_by_power(const Vec &x, const Vec &whole) {
  return each_register([&](int k) {
    const int32x4_t power = vminq_s32(vcvtnq_s32_f32(whole.v[k]), vdupq_n_s32(128));
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(power, vdupq_n_s32(127)), 23);
    const float32x4_t scaled = vmulq_f32(x.v[k], vreinterpretq_f32_s32(bits));
    const uint32x4_t is_tiny = vcltq_f32(whole.v[k], vdupq_n_f32(-126.0f));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), is_tiny));
  });
}

inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
  for (int k = 0; k < 4; ++k) {
    const uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(p + 8 * k));
    first.v[k] = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
    second.v[k] = vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
  }
}
inline Vec load_bfloat16(const uint16_t *p) {
  return each_register([=](int k) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * k), 16)); });
}
inline Vec load_float16(const uint16_t *p) {
  return each_register(
      [=](int k) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * k))); });
}
// Rounded to the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(uint16_t *p, const Vec &x) {
  for (int k = 0; k < 4; ++k) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.v[k]);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t is_number = vceqq_f32(x.v[k], x.v[k]);
    const uint32x4_t rounded = vbslq_u32(is_number, sum, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    vst1_u16(p + 4 * k, vshrn_n_u32(rounded, 16));
  }
}
inline void store_float16(uint16_t *p, const Vec &x) {
  for (int k = 0; k < 4; ++k) vst1_u16(p + 4 * k, vreinterpret_u16_f16(vcvt_f16_f32(x.v[k])));
}

// A quarter of a quarter of turn_words: 4 rows, 4 columns.
inline void turn_four(const uint32_t *const *rows, int column, uint32_t *out) {
  uint32x4_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = vld1q_u32(rows[i] + column);
  const uint64x2_t even_low = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1]));
  const uint64x2_t odd_low = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1]));
  const uint64x2_t even_high = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3]));
  const uint64x2_t odd_high = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
  vst1q_u32(out, vreinterpretq_u32_u64(vtrn1q_u64(even_low, even_high)));
  vst1q_u32(out + 16, vreinterpretq_u32_u64(vtrn1q_u64(odd_low, odd_high)));
  vst1q_u32(out + 32, vreinterpretq_u32_u64(vtrn2q_u64(even_low, even_high)));
  vst1q_u32(out + 48, vreinterpretq_u32_u64(vtrn2q_u64(odd_low, odd_high)));
}
inline void turn_words(const uint32_t *const *rows, uint32_t *out) {
  for (int row = 0; row < 16; row += 4)
    for (int column = 0; column < 16; column += 4)
      turn_four(rows + row, column, out + column * 16 + row);
}

}  // namespace
}  // namespace ost
