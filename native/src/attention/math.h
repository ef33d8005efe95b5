// Products of queries with a tile of stored keys, and of weights with a tile of stored values.
//
// A Math names a stored format and what it is multiplied in. One step takes two dimensions of 16 keys
// (or two positions of 16 dimensions of values), and two numbers of a query (or two weights):
//
//   FloatMath<Format>  both to float32, two multiply-adds: exact to float32, whatever is stored
//   BrainMath          bfloat16 pairs in one VDPBF16PS; queries are bfloat16, weights are rounded to it
//   CodeMath           codes of 8 bits times whole numbers of 16, exact; see kv/codes.h
//
// A sum begins at nothing, or at what a row has gathered, and ends as scores, or as what a row has
// gathered then. The step is what a whole number is worth.
//
// Included after one simd/*.h.
#pragma once

#include <type_traits>

#include "kv/codes.h"
#include "kv/layout.h"

namespace ost {
namespace {

struct Float32 {
  using Element = float;
  static constexpr bool kPairs = false;
  static Vec load_row(const float *p) { return load(p); }
};

struct Float16 {
  using Element = uint16_t;
  static constexpr bool kPairs = false;
  static Vec load_row(const uint16_t *p) { return load_float16(p); }
};

struct Bfloat16 {
  using Element = uint16_t;
  static constexpr bool kPairs = true;
};

// Sums in float, of numbers as they are stored.
struct PlainSums {
  using Sum = Vec;
  static Vec nothing() { return fill(0.0f); }
  static Vec gathered(const float *weighted) { return load(weighted); }
  template <class Stored>
  static Vec scores(const Vec &sum, float, const Stored *) {
    return sum;
  }
  static void put_back(float *weighted, const Vec &sum) { store(weighted, sum); }
};

template <class Format>
struct FloatMath : PlainSums {
  using Stored = typename Format::Element;
  using Operand = float;
  using Weight = float;
  struct Two {
    Vec first, second;
  };
  // Rows: how many queries share a tile; Wide: vectors side by side. So that they fill the registers.
#if defined(__AVX512F__)
  static constexpr int kRows = 4, kWide = 4;
#else
  static constexpr int kRows = 4, kWide = 1;
#endif
  static constexpr bool kPairs = Format::kPairs;

  // Elements from the first of two rows to the second; 32 bfloat16 are both.
  static Two take(const Stored *p, int64_t to_second) {
    Two out;
    if constexpr (kPairs) {
      load_pairs(p, out.first, out.second);
    } else {
      out.first = Format::load_row(p);
      out.second = Format::load_row(p + to_second);
    }
    return out;
  }
  static Two spread(const float *p) { return {fill(p[0]), fill(p[1])}; }
  static Vec add_product(const Vec &sum, const Two &a, const Two &b) {
    return add_plain_product(a.second, b.second, add_plain_product(a.first, b.first, sum));
  }
  static void store_weight(float *p, const Vec &x) { store(p, x); }
};

#if defined(__AVX512BF16__)
inline void store_brain(uint16_t *p, Vec x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
  std::memcpy(p, &rounded, sizeof rounded);
}

struct BrainMath : PlainSums {
  using Stored = uint16_t;
  using Operand = uint16_t;
  using Weight = uint16_t;
  using Two = __m512bh;
  static constexpr int kRows = 6, kWide = 4;
  static constexpr bool kPairs = true;

  static Two take(const uint16_t *p, int64_t) {
    return reinterpret_cast<Two>(_mm512_loadu_si512(p));
  }
  static Two spread(const uint16_t *p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return reinterpret_cast<Two>(_mm512_set1_epi32(bits));
  }
  static Vec add_product(Vec sum, Two a, Two b) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }
  static void store_weight(uint16_t *p, Vec x) { store_brain(p, x); }
};
#endif

struct CodeMath {
  using Stored = int8_t;
  using Operand = int16_t;
  using Weight = float;  // until its value's scale is known
  using Two = Pairs;
  using Sum = Ints;
#if defined(__AVX512F__)
  static constexpr int kRows = 6, kWide = 4;
#else
  static constexpr int kRows = 4, kWide = 1;
#endif
  static constexpr bool kPairs = true;

  static Pairs take(const int8_t *p, int64_t) { return load_codes(p); }
  static Pairs spread(const int16_t *p) { return fill_pairs(p); }
  static Ints add_product(const Ints &sum, const Pairs &a, const Pairs &b) {
    return add_products(sum, a, b);
  }
  static void store_weight(float *p, const Vec &x) { store(p, x); }
  static Ints nothing() { return no_ints(); }
  static Ints gathered(const float *) { return no_ints(); }
  static Vec scores(const Ints &sum, float step, const int8_t *keys) {
    return float_of_ints(sum) * (load(scales_of(keys)) * fill(step));
  }
  static void put_back(float *weighted, const Ints &sum, float step) {
    store(weighted, multiply_add(float_of_ints(sum), fill(step), load(weighted)));
  }
};

template <class Math>
constexpr bool kHasCodes = std::is_same_v<typename Math::Stored, int8_t>;

// 2 to the x - top for whole tops that x hardly exceeds: a polynomial in x - floor(x), times
// 2^(floor(x) - top). So another top scales the result, and rounds nothing in another way. Relative error
// 1e-7 with kTerms = 5, 8e-5 with 3, which bfloat16 weights do not see. Very small results are 0 sharp.
template <int kTerms>
inline Vec power_of_two(const Vec &x, const Vec &top) {
  const Vec whole = whole_part(x), part = x - whole;
  Vec sum;
  if constexpr (kTerms == 5) {
    sum = multiply_add(fill(0.00187757669f), part, fill(0.00898933969f));
    sum = multiply_add(sum, part, fill(0.0558263175f));
    sum = multiply_add(sum, part, fill(0.240153611f));
    sum = multiply_add(sum, part, fill(0.693153083f));
    sum = multiply_add(sum, part, fill(0.99999994f));
  } else {
    static_assert(kTerms == 3, "degrees 3 and 5");
    sum = multiply_add(fill(0.0780245215f), part, fill(0.226067156f));
    sum = multiply_add(sum, part, fill(0.695833564f));
    sum = multiply_add(sum, part, fill(0.999925196f));
  }
  return scale_by_power(sum, whole - top);
}

}  // namespace
}  // namespace ost
