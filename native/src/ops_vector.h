// How are numbers of a format read into vectors, and rounded back?
//
// Vectors are the compiler's own (GCC's and Clang's vector extension), as wide as the instruction
// set that the including file is compiled for. Everything has internal linkage: the same function
// compiled for two instruction sets must not be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
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
  static Floats widen(const Halves &stored) {
    return reinterpret_cast<Floats>(__builtin_convertvector(stored, Words) << 16);
  }
  // To nearest, ties to even; NaN stays NaN. The processor's own instruction takes numbers below
  // 2^-126 for zero.
#if defined(__AVX512BF16__)
  static Halves narrow(const Floats &value) {
    return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(value));
  }
  static Floats round(const Floats &value) { return widen(narrow(value)); }
#else
  static Words rounded(const Floats &value) {
    const Words bits = reinterpret_cast<Words>(value);
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value == value ? nearest : (Words{} + 0x7fc0);
  }
  static Halves narrow(const Floats &value) {
    return __builtin_convertvector(rounded(value), Halves);
  }
  static Floats round(const Floats &value) {
    return reinterpret_cast<Floats>(rounded(value) << 16);
  }
#endif
};

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

// Halves are added to halves, so that it takes log2(kLanes) additions one after the other.
inline float sum(const Floats &values) {
  float lanes[kLanes];
  std::memcpy(lanes, &values, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// e^x to about two units in the last place; x is taken into -87..88.
// Source: Cody and Waite's reduction and the polynomial of Cephes' expf.
inline Floats exponential(Floats x) {
  x = x < all(88.f) ? x : all(88.f);
  x = x > all(-87.f) ? x : all(-87.f);
  constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
  const Floats power = (x * 1.44269504f + kRounder) - kRounder;
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats series = all(1.9875691500e-4f);
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.f;
  const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
  return series * reinterpret_cast<Floats>(exponent);
}

}  // namespace
