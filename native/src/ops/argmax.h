// The position of a row's largest number.
//
// Numbers are compared by their bits. Without its sign, a float's bits grow as it does; an integer
// with the float's sign therefore stands for it, zero for both zeros, and a NaN is what is beyond
// infinity. The compiler makes vectors of the loop, which has nothing but integers.
#pragma once

#include <cstdint>
#include <limits>

#include "ostinato_ops.h"

namespace {

// Numbers after which the best so far is looked at: where it stands is then found among them.
constexpr int64_t kBestChunk = 512;

template <class Bits>
Bits ordered(Bits number) {
  const Bits size = number & std::numeric_limits<Bits>::max();
  return static_cast<Bits>(number < 0 ? -size : size);
}

template <class Bits>
struct Extremes {
  Bits best = std::numeric_limits<Bits>::min();
  Bits size = 0;  // of whatever is farthest from zero
};

template <class Bits>
Extremes<Bits> extremes(const Bits *numbers, int64_t count) {
  Extremes<Bits> result;
  for (int64_t i = 0; i < count; ++i) {
    const Bits size = numbers[i] & std::numeric_limits<Bits>::max(), value = ordered(numbers[i]);
    result.best = value > result.best ? value : result.best;
    result.size = size > result.size ? size : result.size;
  }
  return result;
}

// The first of the largest; -1 where that is not finite, or one of them is NaN.
template <class Bits>
int64_t best_of_row(const Bits *row, int64_t width, Bits infinity) {
  Extremes<Bits> all;
  int64_t chunk = 0;
  for (int64_t i = 0; i < width; i += kBestChunk) {
    const auto result = extremes(row + i, width - i < kBestChunk ? width - i : kBestChunk);
    if (result.best > all.best) all.best = result.best, chunk = i;
    if (result.size > all.size) all.size = result.size;
  }
  if (all.size > infinity || all.best >= infinity || all.best <= -infinity) return -1;
  while (ordered(row[chunk]) != all.best) ++chunk;
  return chunk;
}

inline void best_rows(const ost_best &op, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t begin = row * op.numbers.stride;
    const auto *halves = static_cast<const int16_t *>(op.numbers.data) + begin;
    const auto *words = static_cast<const int32_t *>(op.numbers.data) + begin;
    op.places[row] = op.dtype == OST_FLOAT32 ? best_of_row<int32_t>(words, op.width, 0x7f800000)
                     : op.dtype == OST_BFLOAT16
                         ? best_of_row<int16_t>(halves, op.width, 0x7f80)
                         : best_of_row<int16_t>(halves, op.width, 0x7c00);
  }
}

}  // namespace
