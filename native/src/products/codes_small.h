// Products of codes of 4 bits and rows of 8, where the processor adds products of bytes in 16 bits alone.
//
// Two products of a pair add up to at most 30 * 128, and eight pairs of them fit. So the 32 inputs of a
// block, for which a row has a scale of its own, need no wider sums before its end: those of 16 bits take
// all registers, for six rows and 16 outputs with AVX2.
#pragma once

#include "products/codes_rows.h"
// after it
#include "products/codes_unpack.h"

namespace ost {
namespace {

// Codes of 32 outputs.
struct Tile {
  const char *codes;
  int64_t index;
};

#if defined(OST_SMALL_SUMS)

// Sums of a block of kRows rows with kSides * 16 outputs. Those of codes that are larger end in the middle.
template <class Codes, int kRows, int kSides>
struct SmallBlock {
  static constexpr bool kHasParts = Codes::kSmallInputs < kInputsPerStep;
  static constexpr int kNear = 3;  // rows that one pointer reaches
  const int8_t *rows[(kRows + kNear - 1) / kNear];
  int64_t stride;
  SmallSums sums[kRows][kSides], before[kRows][kSides];

  template <int kDot>
  void add_dot(const char *step, int64_t input) {
    Pairs weights[kSides];
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) weights[side] = Codes::template load<kDot>(step, side);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const int8_t *from = rows[row / kNear] + row % kNear * stride + input + kDot * Halves::kDotInputs;
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side) add_small(sums[row][side], weights[side], from);
    }
  }

  void add(const char *step, int64_t input) {
    if constexpr (kHasParts) {
      add_part(step, input);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int side = 0; side < kSides; ++side) before[row][side] = sums[row][side];
    }
    constexpr int kFirst = kInputsPerStep - Codes::kSmallInputs;
    add_part(step + kFirst / kStepInputs * Codes::kStepBytes, input + kFirst);
  }

  void add_part(const char *step, int64_t input) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side) sums[row][side] = no_small_sums();
#pragma GCC unroll 4
    for (int i = 0; i < Codes::kSmallInputs; i += kStepInputs) {
      const char *own = step + i / kStepInputs * Codes::kStepBytes;
      prefetch_ahead<Codes>(own);
      add_dot<0>(own, input + i);
      add_dot<1>(own, input + i);
    }
  }

  Ints added_to(Ints start, int row, int side) const {
    if constexpr (kHasParts) start = add_sums(start, before[row][side]);
    return add_sums(start, sums[row][side]);
  }
};

// What a group's codes are less than, or more.
enum class Shift { kFixed, kMinima, kZeros };

template <class Codes, Shift kShift, int kRows, int kSides>
inline void sum_small(const ost_product &p, const Rows &rows, int64_t first_row, const Tile &tile,
                      int first, float (*totals)[kTileOutputs]) {
  const char *step = tile.codes + Codes::side(p, first);
  const auto *zeros = static_cast<const int8_t *>(p.zeros);
  SmallBlock<Codes, kRows, kSides> block;
  const auto *integers = reinterpret_cast<const int8_t *>(rows.integers) + first_row * rows.stride;
  block.stride = rows.stride;
  for (int row = 0; row < kRows; row += block.kNear)
    block.rows[row / block.kNear] = integers + row * rows.stride;
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) store(totals[row] + (first + side) * 16, fill(0.f));
  int64_t place = tile.index * num_groups(p) * kTileOutputs + first * 16;
  int64_t left = p.group_size, mark = first_row * rows.marks;
  for (int64_t input = 0; input < p.num_inputs; input += kInputsPerStep, ++mark) {
    block.add(step, input);
    step += kInputsPerStep / kStepInputs * Codes::kStepBytes;
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      const int64_t own = place + side * 16;
      const Vec scale = load_scales(p, p.scales, own);
      const Vec minimum = kShift == Shift::kMinima ? load_scales(p, p.minima, own) : fill(0.f);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const int64_t at = mark + row * rows.marks;
        Ints start = kShift == Shift::kFixed ? all_of(rows.starts[at]) : no_ints();
        if (kShift == Shift::kZeros) start = less(start, zeros + own, rows.sums[at]);
        Vec value = float_of_ints(block.added_to(start, row, side)) * scale;
        if (kShift == Shift::kMinima) value = multiply_add(minimum, fill(rows.float_sums[at]), value);
        float *total = totals[row] + (first + side) * 16;
        store(total, multiply_add(value, fill(rows.scales[at]), load(total)));
      }
    }
    if ((left -= kInputsPerStep) == 0) left = p.group_size, place += kTileOutputs;
  }
}

template <class Codes, int kRows, int kSides>
inline void sum_small(const ost_product &p, const Rows &rows, int64_t first_row, const Tile &tile,
                      int first, float (*totals)[kTileOutputs]) {
  constexpr bool kIsFixed = !std::is_same_v<Codes, Halves>;  // a table has neither minima nor zeros
  const auto own = kIsFixed             ? sum_small<Codes, Shift::kFixed, kRows, kSides>
                   : p.minima != nullptr ? sum_small<Codes, Shift::kMinima, kRows, kSides>
                   : p.zeros != nullptr  ? sum_small<Codes, Shift::kZeros, kRows, kSides>
                                         : sum_small<Codes, Shift::kFixed, kRows, kSides>;
  own(p, rows, first_row, tile, first, totals);
}

#endif

}  // namespace
}  // namespace ost
