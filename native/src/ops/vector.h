// Reads numbers of a format into vectors, and rounds vectors back to the format.
//
// Vectors are the compiler's own (GCC's and Clang's vector extension), as wide as the instruction
// set that the including file is compiled for. Everything has internal linkage: the same function
// compiled for two instruction sets must not be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/formats.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

namespace {

inline Floats all(float value) { return Floats{} + value; }

// Formats: how a number lies in memory, and what rounding to it does.
struct Float32 {
  using Stored = float;
  static Floats widen(const Floats &stored) { return stored; }
  static Floats narrow(const Floats &value) { return value; }
  static Floats round(const Floats &value) { return value; }
  using StoredVector = Floats;
};

struct BFloat16 {
  using Stored = uint16_t;
  using StoredVector = Halves;
#if defined(__AVX512F__)
  // One instruction instead of two: the halves of words go where they belong, and zeros between.
  static Floats widen(const Halves &stored) {
    alignas(64) static constexpr uint16_t places[32] = {
        0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
        0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
    const __m512i halves = _mm512_castsi256_si512(reinterpret_cast<__m256i>(stored));
    return reinterpret_cast<Floats>(
        _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(places), halves));
  }
#else
  static Floats widen(const Halves &stored) {
    return reinterpret_cast<Floats>(__builtin_convertvector(stored, Words) << 16);
  }
#endif
  // To nearest, ties to even; NaN stays NaN.
  static Words rounded(const Floats &value) {
    const Words bits = reinterpret_cast<Words>(value);
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value == value ? nearest : (Words{} + 0x7fc0);
  }
#if defined(__AVX512BF16__)
  // The processor's own instruction takes numbers below 2^-126 for zero: gates that are nearly shut.
  static Halves narrow(const Floats &value) {
    constexpr int kBelowNormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(reinterpret_cast<__m512>(value), kBelowNormal) != 0, 0))
      return __builtin_convertvector(rounded(value), Halves);
    return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(value)));
  }
  static Floats round(const Floats &value) { return widen(narrow(value)); }
#else
  static Halves narrow(const Floats &value) {
    return __builtin_convertvector(rounded(value), Halves);
  }
  static Floats round(const Floats &value) {
    return reinterpret_cast<Floats>(rounded(value) << 16);
  }
#endif
};

// Calls visit(i, count) for vectors of numbers i .. i + count - 1 of a row. A count of whole vectors
// is known to the compiler.
template <class Visit>
inline void each_vector(int width, Visit visit) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) visit(i, std::integral_constant<int, kLanes>{});
  if (i < width) visit(i, width - i);
}

// Read count numbers, at most kLanes; the other lanes are zero.
template <class Format>
inline Floats load(const typename Format::Stored *from, int count = kLanes) {
  typename Format::StoredVector stored{};
  if (count == kLanes)
    std::memcpy(&stored, from, sizeof stored);
  else
    std::memcpy(&stored, from, static_cast<size_t>(count) * sizeof(*from));
  return Format::widen(stored);
}

template <class Format>
inline void store(typename Format::Stored *to, const Floats &value, int count = kLanes) {
  const typename Format::StoredVector stored = Format::narrow(value);
  if (count == kLanes)
    std::memcpy(to, &stored, sizeof stored);
  else
    std::memcpy(to, &stored, static_cast<size_t>(count) * sizeof(*to));
}

// a * b + c, rounded once.
inline Floats multiply_add(const Floats &a, const Floats &b, const Floats &c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__ARM_NEON)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
      reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  static_assert(kLanes == 4, "vectors of processors without FMA");
  float numbers[4][4];
  std::memcpy(numbers[0], &a, sizeof a);
  std::memcpy(numbers[1], &b, sizeof b);
  std::memcpy(numbers[2], &c, sizeof c);
  ost::fused_multiply_add(numbers[0], numbers[1], numbers[2], numbers[3]);
  Floats out;
  std::memcpy(&out, numbers[3], sizeof out);
  return out;
#endif
}

// A sum over a row in 32 lanes, whatever the width of vectors: number i of a row is added in lane i % 32,
// and halves of the lanes to halves, so that every instruction set rounds alike.
class RowSum {
 public:
  static constexpr int kParts = 32 / kLanes;
  // value(i, count) gives numbers i .. i + count - 1; add(sum, value) adds them to those before.
  template <class Value, class Add>
  void over(int width, Value value, Add add) {
    int i = 0;
    for (; i + 32 <= width; i += 32)
#pragma GCC unroll 8
      for (int part = 0; part < kParts; ++part) {
        const int from = i + part * kLanes;
        parts_[part] = add(parts_[part], value(from, std::integral_constant<int, kLanes>{}));
      }
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part, i += kLanes) {
      if (i + kLanes <= width)
        parts_[part] = add(parts_[part], value(i, std::integral_constant<int, kLanes>{}));
      else if (i < width)
        parts_[part] = add(parts_[part], value(i, width - i));
    }
  }
  float total() const {
    float lanes[32];
    std::memcpy(lanes, parts_, sizeof lanes);
    for (int half = 16; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
  }

 private:
  Floats parts_[kParts] = {};
};

// a / b for b from 1 to 2^126, rounded as division rounds unless a is below 2^-100. The first guess is the
// bits of b taken from a constant, right to a twentieth; a cubic step makes it 1e-4, two of Newton's make
// it the reciprocal rounded to the nearest, unless all digits of b are ones, and then the last step rounds the quotient right.
// Source: Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, IBM
// Journal of Research and Development 34(1), 1990, theorem 8.
inline Floats quotient_by_steps(const Floats &a, const Floats &b) {
  const Floats guess = reinterpret_cast<Floats>(0x7ef311c7 - reinterpret_cast<Ints>(b));
  const Floats off = multiply_add(-b, guess, all(1.f));
  const Floats nearer = multiply_add(guess, multiply_add(off, off, off), guess);
  const Floats near = multiply_add(nearer, multiply_add(-b, nearer, all(1.f)), nearer);
  const Floats inverse = multiply_add(near, multiply_add(-b, near, all(1.f)), near);
  const Floats quotient = a * inverse;
  return multiply_add(multiply_add(-b, quotient, a), inverse, quotient);
}

// Dividing 16 numbers takes AVX-512 longer than the steps do.
inline Floats quotient(const Floats &a, const Floats &b) {
#if defined(__AVX512F__)
  const __m512i ones = _mm512_set1_epi32(0x7fffff);
  const __m512i missing = _mm512_andnot_si512(reinterpret_cast<__m512i>(b), ones);
  if (__builtin_expect(_mm512_testn_epi32_mask(missing, missing) != 0, 0)) return a / b;
  return quotient_by_steps(a, b);
#else
  return a / b;
#endif
}

// Lanes taken into low..high.
inline Floats clamped(const Floats &x, float low, float high) {
#if defined(__AVX512F__)
  const __m512 above = _mm512_max_ps(reinterpret_cast<__m512>(x), _mm512_set1_ps(low));
  return reinterpret_cast<Floats>(_mm512_min_ps(above, _mm512_set1_ps(high)));
#else
  const Floats above = x > all(low) ? x : all(low);
  return above < all(high) ? above : all(high);
#endif
}

// x * 2^power, for whole powers from -126 to 127.
inline Floats scaled(const Floats &x, const Floats &power) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(power)));
#else
  return x * reinterpret_cast<Floats>((__builtin_convertvector(power, Ints) + 127) << 23);
#endif
}

// e^x to about two units in the last place; x is taken into -87..87.
// Source: Cody and Waite's reduction; the polynomial is the best of degree 5 that begins 1 + x, its
// error 2^-23 of e^x.
inline Floats exponential(Floats x) {
  x = clamped(x, -87.f, 87.f);
  constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
  const Floats power = multiply_add(x, all(1.44269504f), all(kRounder)) - kRounder;
  const Floats rest =
      multiply_add(power, all(2.12194440e-4f), multiply_add(power, all(-0.693359375f), x));
  Floats series = all(8.31252e-3f);
  constexpr float lower[] = {4.189011e-2f, 1.6667114e-1f, 4.9999232e-1f, 1.f, 1.f};
  for (const float next : lower) series = multiply_add(series, rest, all(next));
  return scaled(series, power);
}

inline Floats silu(const Floats &x) { return quotient(x, 1.f + exponential(-x)); }

// x / 2 * (1 + tanh(y)) is x / (1 + e^(-2y)).
inline Floats gelu_by_tanh(const Floats &x) {
  const Floats y = x * (0.7978845608f + 0.7978845608f * 0.044715f * (x * x));
  return quotient(x, 1.f + exponential(-2.f * y));
}

// x / 2 * (1 + erf(x / sqrt(2))).
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; an error of 1.5e-7.
inline Floats gelu_by_erf(const Floats &x) {
  const Floats positive = x > 0.f ? x : -x;
  const Floats t = 1.f / multiply_add(positive, all(0.3275911f * 0.70710678f), all(1.f));
  Floats series = all(1.061405429f);
  constexpr float lower[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  for (const float next : lower) series = multiply_add(series, t, all(next));
  const Floats rest = series * t * exponential(-0.5f * x * x);  // 1 - erf
  return 0.5f * x * (x > 0.f ? 2.f - rest : rest);
}

}  // namespace
