// Rows of a product as integers, with a scale for each span of inputs.
#pragma once

#include "products/codes_formats.h"
// after it
#include "products/numbers.h"
#include "threads/scratch.h"
#include "threads/work.h"

namespace ost {
namespace {

// By span what an integer is worth; by block the sum of its integers, as a float as well, and where the
// sum of products begins, since codes are more than the weight's own. A row of float32 is two rows of
// integers, of which the second one is what the first one leaves.
struct Rows {
  char *integers;  // of 16 or 8 bits
  float *scales, *float_sums;
  int32_t *sums, *starts;
  int64_t stride, marks;  // integers, and scales or sums, of a row
  int parts;  // rows of integers that a row is
};

template <class Integer>
inline const Integer *row_of(const Rows &rows, int64_t row) {
  return reinterpret_cast<const Integer *>(rows.integers) + row * rows.stride;
}

// How numbers become integers: the largest of a span becomes the largest integer.
struct Levels {
  float min, max, size;
};
constexpr Levels kLevels16{-32767.f, 32767.f, 32767.f};
// As compressed-tensors scales a token: 255 steps between the largest and its opposite. It divides by the
// scale, and which code a number in the middle gets depends on that.
constexpr Levels kLevels8{-128.f, 127.f, 127.5f};

// One span. Where one is no number, the scale is none.
template <class Numbers, bool kDivides, class Integer>
inline float make_span(const typename Numbers::Stored *numbers, int64_t count, Levels levels,
                       Integer *integers) {
  constexpr float kMinSize = 1e-30f;  // what is less counts for nothing
  Vec max[2] = {fill(0.f), fill(0.f)}, strange[2] = {fill(0.f), fill(0.f)};  // none waits for the other
  for (int64_t i = 0; i < count; i += 32) {
    for (int half = 0; half < 2; ++half) {
      const Vec x = Numbers::load_numbers(numbers + i + half * 16);
      max[half] = larger(larger(x, fill(0.f) - x), max[half]);
      strange[half] = multiply_add(x, fill(0.f), strange[half]);  // zero, if all are finite
    }
  }
  const bool is_finite = total(strange[0] + strange[1]) == 0.f;
  const float size = is_finite ? largest(larger(max[0], max[1])) : 0.f, scale = size / levels.size;
  const Vec low = fill(levels.min), high = fill(levels.max);
  const Vec step = fill(kDivides ? scale : levels.size / size);
  for (int64_t i = 0; i < count; i += 16) {
    const Vec number = Numbers::load_numbers(numbers + i), x = kDivides ? number / step : number * step;
    const Vec rounded = size < kMinSize ? fill(0.f) : larger(smaller(x, high), low);
    if constexpr (sizeof(Integer) == 1) store_int8(integers + i, rounded);
    else store_int16(integers + i, rounded);
  }
  return !is_finite ? NAN : size < kMinSize ? 0.f : scale;
}

// Puts each eight integers of a row into the order of the codes' bytes.
template <class Integer>
inline void reorder(Integer *integers, int64_t count, const int *order) {
  for (int64_t i = 0; i < count; i += 8) {
    Integer eight[8];
    std::memcpy(eight, integers + i, sizeof eight);
    for (int k = 0; k < 8; ++k) integers[i + k] = eight[order[k]];
  }
}

// Numbers of a row, in the order of the weight's inputs; what only fills it up is zero.
template <class Stored>
inline const Stored *in_order(const ost_product &p, const Stored *row, Stored *memory) {
  if (p.order == nullptr && p.used_inputs == p.num_inputs) return row;
  for (int64_t i = 0; i < p.used_inputs; ++i) memory[i] = row[p.order == nullptr ? i : p.order[i]];
  std::fill(memory + p.used_inputs, memory + p.num_inputs, Stored{});
  return memory;
}

// What a row of integers leaves of its numbers; may be in their place.
inline void leave(const ost_product &p, const float *numbers, const int16_t *integers, const float *scales,
                  float *rest) {
  for (int64_t begin = 0, end; begin < p.num_inputs; begin = end, ++scales) {
    end = end_of_span(p, begin);
    for (int64_t i = begin; i < end; ++i) rest[i] = std::fma(-*scales, integers[i], numbers[i]);
  }
}

template <class Numbers, bool kDivides, class Integer, int kParts = 1>
Rows integers_of(const ost_product &p, int32_t more, const int *places, Levels levels) {
  using Stored = typename Numbers::Stored;
  const int64_t stride = p.num_inputs + 64 / sizeof(Integer), marks = p.num_inputs / kMinGroup + 1;
  const int64_t num_rows = int64_t{p.num_rows} * kParts;
  const int64_t size = stride * sizeof(Integer) * num_rows, count = marks * num_rows;
  char *memory = static_cast<char *>(thread_scratch(size + count * 16 + p.num_inputs * 4));
  auto *scales = reinterpret_cast<float *>(memory + size), *float_sums = scales + count;
  auto *sums = reinterpret_cast<int32_t *>(float_sums + count), *starts = sums + count;
  auto *ordered = reinterpret_cast<Stored *>(starts + count);
  const bool are_summed = more != 0 || p.minima != nullptr || p.zeros != nullptr;
  const Stored *numbers = nullptr;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row % kParts == 0) {
      const auto *given = static_cast<const Stored *>(p.inputs.data) + row / kParts * p.inputs.stride;
      numbers = in_order(p, given, ordered);
    }
    auto *integers = reinterpret_cast<Integer *>(memory) + row * stride;
    int64_t span = row * marks, block = row * marks;
    for (int64_t begin = 0, end; begin < p.num_inputs; begin = end) {
      end = end_of_span(p, begin);
      scales[span++] = make_span<Numbers, kDivides>(numbers + begin, end - begin, levels, integers + begin);
      for (int64_t i = begin, last; i < end; i = last) {
        last = end_of_block(p, i);
        int32_t sum = 0;
        if (are_summed)
          for (int64_t j = i; j < last; ++j) sum += integers[j];
        float_sums[block] = static_cast<float>(sum);
        starts[block] = -more * sum;
        sums[block++] = sum;
      }
    }
    if constexpr (kParts > 1) {
      if (row % kParts + 1 < kParts) leave(p, numbers, integers, scales + row * marks, ordered);
      numbers = ordered;
    }
    if (places != nullptr) reorder(integers, p.num_inputs, places);
  }
  return {memory, scales, float_sums, sums, starts, stride, marks, kParts};
}

template <class Integer>
Rows make_integers(const ost_product &p, int32_t more, const int *places) {
  if constexpr (sizeof(Integer) == 2) {
    if (p.activation_bits == 0)
      return p.dtype == OST_FLOAT32
                 ? integers_of<Float32Numbers, false, Integer, 2>(p, more, places, kLevels16)
                 : integers_of<BFloat16Numbers, false, Integer>(p, more, places, kLevels16);
  }
  return p.dtype == OST_FLOAT32    ? integers_of<Float32Numbers, true, Integer>(p, more, places, kLevels8)
         : p.dtype == OST_BFLOAT16 ? integers_of<BFloat16Numbers, true, Integer>(p, more, places, kLevels8)
                                   : integers_of<Float16Numbers, true, Integer>(p, more, places, kLevels8);
}

// The integers of a block of rows, made once by each thread that multiplies with them; codes are `more`
// than the weight's own, and each eight integers are at `places`, if not in order. Works have one weight,
// so one way of `more` and `places`; but its experts may each have an order of inputs.
template <class Integer>
Rows integers_of(const ost_product &p, int32_t more, const int *places = nullptr) {
  struct CachedIntegers {
    int64_t work = -1;
    const void *rows = nullptr;
    const int32_t *order = nullptr;
    Rows integers;
  };
  static thread_local CachedIntegers cached;
  if (cached.work != works_begun() || cached.rows != p.inputs.data || cached.order != p.order)
    cached = {works_begun(), p.inputs.data, p.order, make_integers<Integer>(p, more, places)};
  return cached.integers;
}

}  // namespace
}  // namespace ost
