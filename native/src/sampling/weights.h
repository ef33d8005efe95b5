// The weight of a token: e^((score - best) / temperature), as a whole number.
//
// Sums of whole numbers are exact in any order, so a row's sums depend neither on the batch nor on the
// instruction set. Weights are made of additions and products that every instruction set rounds alike; none is
// fused. The largest weight is a power of two such that a row's sum stays below 2^62.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kDoubles = 8;
#elif defined(__AVX2__)
constexpr int kDoubles = 4;
#else
constexpr int kDoubles = 2;
#endif

typedef double Doubles __attribute__((vector_size(8 * kDoubles)));
typedef int64_t Longs __attribute__((vector_size(8 * kDoubles)));
typedef uint64_t Masses __attribute__((vector_size(8 * kDoubles)));
typedef uint16_t Buckets __attribute__((vector_size(2 * kDoubles)));
typedef float FewFloats __attribute__((vector_size(4 * kDoubles)));

namespace {

// Scores that are worked on together; rows are filled up with -inf to whole chunks.
constexpr int64_t kChunk = 64;

// Buckets of histograms of mass, by distance from the best score: each 1/32, the last one open.
constexpr int64_t kBuckets = 1024;
constexpr double kBucketsPerUnit = 32;

// What is added to a number to read it as a whole one from its lower bits.
constexpr double kWhole = 0x1.8p52;

// The logarithm of long doubles is in every C library; that of doubles has a version of glibc 2.29.
inline double natural_log(double number) { return static_cast<double>(std::log(static_cast<long double>(number))); }

struct Weights {
  double best = 0;
  double temperature = 1;
  double min_p = 0;  // weights below are zero
  int64_t scale = 62;  // the weight of the best is 2^scale
  double void_below;   // scores below have no mass; with a margin for rounding

  Weights(double best_, double temperature_, double min_p_, int64_t width)
      : best(best_), temperature(temperature_), min_p(min_p_) {
    for (int64_t rest = width; rest > 0; rest >>= 1) --scale;
    double lowest = -0.7 * static_cast<double>(scale + 2);
    if (min_p > 0 && natural_log(min_p) - 1e-6 > lowest) lowest = natural_log(min_p) - 1e-6;
    void_below = best + lowest * temperature;
  }

  // Distance of scores from the best, at most 0; -700 stands for all that is below.
  template <bool kDivides = true>
  Doubles distance(const float *scores) const {
    FewFloats few;
    std::memcpy(&few, scores, sizeof few);
    Doubles x = __builtin_convertvector(few, Doubles) - best;
    if (kDivides) x /= temperature;
    const Doubles low = Doubles{} - 700;
    return x < low ? low : x;
  }

  // floor(e^x * 2^scale). Cody and Waite's reduction, and e^x's series up to x^12.
  Masses masses(const Doubles &x) const {
    const Doubles shifted = x * 1.4426950408889634 + kWhole, power = shifted - kWhole;
    const Longs whole = reinterpret_cast<Longs>(shifted) - reinterpret_cast<Longs>(Doubles{} + kWhole);
    const Doubles rest = (x - power * 0x1.62e42feep-1) - power * 0x1.a39ef35793c76p-33;
    const Doubles series = series_at(rest);
    const Longs bits = reinterpret_cast<Longs>(series);
    const Longs fraction = (bits & 0xfffffffffffffl) | 0x10000000000000l;
    const Longs exponent = (bits >> 52) - 1023 + whole;
    const int64_t left = scale > 52 ? scale - 52 : 0;
    Longs right = (52 - scale + left) - exponent;
    right = right > 63 ? Longs{} + 63 : right;
    const Longs mass = reinterpret_cast<Longs>(reinterpret_cast<Masses>(fraction << left) >>
                                               reinterpret_cast<Masses>(right));
    if (min_p <= 0) return reinterpret_cast<Masses>(mass);
    const Doubles weight = reinterpret_cast<Doubles>(bits + (whole << 52));
    return reinterpret_cast<Masses>(weight < min_p ? Longs{} : mass);
  }

  // Whether all scores up to this one have no mass.
  bool is_void(float score) const { return static_cast<double>(score) < void_below; }

  // e^x for |x| <= 0.35, in few steps that wait for each other (Estrin).
  static Doubles series_at(const Doubles &x) {
    const Doubles x2 = x * x, x4 = x2 * x2, x8 = x4 * x4;
    const Doubles low = (1. + x) + (.5 + x * (1 / 6.)) * x2;
    const Doubles middle = (1 / 24. + x * (1 / 120.)) + (1 / 720. + x * (1 / 5040.)) * x2;
    const Doubles high = (1 / 40320. + x * (1 / 362880.)) + (1 / 3628800. + x * (1 / 39916800.)) * x2;
    return (low + middle * x4) + (high + x4 * (1 / 479001600.)) * x8;
  }

  // The bucket of each distance.
  static Buckets buckets(const Doubles &x) {
    const Doubles place = x * -kBucketsPerUnit, last = Doubles{} + (kBuckets - 1);
    const Longs bits = reinterpret_cast<Longs>((place > last ? last : place) + kWhole);
    return __builtin_convertvector(bits - reinterpret_cast<Longs>(Doubles{} + kWhole), Buckets);
  }
};

template <class Number, class Vector>
inline void put(Number *to, const Vector &numbers) {
  std::memcpy(to, &numbers, sizeof numbers);
}

// Calls visit(i, x) for the distances of scores i .. of a chunk.
template <class Visit>
inline void each_distance(const Weights &weights, const float *chunk, Visit visit) {
  if (weights.temperature == 1)
    for (int64_t i = 0; i < kChunk; i += kDoubles) visit(i, weights.distance<false>(chunk + i));
  else
    for (int64_t i = 0; i < kChunk; i += kDoubles) visit(i, weights.distance<true>(chunk + i));
}

}  // namespace
