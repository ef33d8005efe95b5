// Cosines and sines of angles, the same on every system: additions and products of doubles, which all
// round alike, where the functions of C libraries and of torch differ in the last bit.
#include <cstring>

#include "ostinato_ops.h"

namespace {

// x - k * pi / 2 for the nearest whole k, and k's last two bits. The first part of pi / 2 has 33 bits, so
// that its product with k is exact for angles up to a million.
// Source: fdlibm's e_rem_pio2.c, of which this is the case of two parts.
struct Turn {
  double rest;
  int64_t quarters;
  explicit Turn(float angle) {
    constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52: what is added to it loses its fraction
    const double x = angle, sum = x * 0.63661977236758134308 + kRounder;
    const double k = sum - kRounder;
    rest = (x - k * 1.57079632673412561417) - k * 6.07710050650619224932e-11;
    std::memcpy(&quarters, &sum, sizeof quarters);
    quarters &= 3;
  }
};

// Taylor's series up to pi / 4, whose rest is below 1e-14.
inline double sine_of(double x) {
  constexpr double terms[] = {-1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120, -1. / 6};
  const double square = x * x;
  double sum = 1. / 6227020800;
  for (const double term : terms) sum = sum * square + term;
  return x + x * (square * sum);
}
inline double cosine_of(double x) {
  constexpr double terms[] = {-1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -1. / 2};
  const double square = x * x;
  double sum = 1. / 479001600;
  for (const double term : terms) sum = sum * square + term;
  return 1 + square * sum;
}

// A quarter of a turn makes sines of cosines; half of one changes their signs.
inline float value_at(const Turn &turn, int64_t further) {
  const int64_t quarter = (turn.quarters + further) & 3;
  const double size = quarter & 1 ? cosine_of(turn.rest) : sine_of(turn.rest);
  return static_cast<float>(quarter & 2 ? -size : size);
}

}  // namespace

extern "C" void ost_turns(const float *angles, float *cosines, float *sines, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Turn turn(angles[i]);
    if (cosines != nullptr) cosines[i] = value_at(turn, 1);
    if (sines != nullptr) sines[i] = value_at(turn, 0);
  }
}
