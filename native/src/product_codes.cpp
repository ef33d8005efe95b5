// Products with a weight in 8 or 4 bits, compiled once for each instruction set; OST_CODES is the
// function that hands the kernels out.
//
// A weight is its code times its group's scale, plus the group's minimum where there are such:
//
//     output = sum over groups of  scale * sum(code * input) + minimum * sum(input)
//
// Rows of bfloat16 become integers first: within a block of inputs, 16 bits of the largest. That
// is finer than bfloat16 is there, and integers are multiplied two by two as bfloat16 is, while codes
// become integers by a shift and a mask. Sums of a block are exact, whatever their order. A row's
// integers are its own, so that its outputs do not depend on the rows beside it.
//
// For other formats, and for AMX, a tile is expanded to plain numbers, see product.cpp.
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif
// after it
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "product_kernels.h"
#include "scratch.h"

namespace ost {

namespace {

// Pairs: two neighbouring inputs of 16 outputs, 16 bits each. Sums: 32 bits of 16 outputs.
#if defined(__AVX512F__)
constexpr int kMostRows = 8, kMostNibbleRows = 6, kRowsOfWholeTiles = 8;
struct Pairs {
  __m512i v;
};
using Sums = Pairs;

inline Sums all_of(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline Pairs load_bytes(const char *from) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)))};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(from), 4 * kNibble);
  return {kNibble == 3 ? words : _mm512_and_si512(words, _mm512_set1_epi16(15))};
}
inline Sums add_products(Sums sums, Pairs weights, Pairs inputs) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(sums.v, weights.v, inputs.v)};
#else
  return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(weights.v, inputs.v))};
#endif
}
inline Vec floats(Sums sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
inline Vec first_of(Pairs pairs) {
  return floats({_mm512_srai_epi32(_mm512_slli_epi32(pairs.v, 16), 16)});
}
inline Vec second_of(Pairs pairs) { return floats({_mm512_srai_epi32(pairs.v, 16)}); }
inline void store_integers(int16_t *to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
#elif defined(__AVX2__)
constexpr int kMostRows = 4, kMostNibbleRows = 4, kRowsOfWholeTiles = 2;
struct Pairs {
  __m256i a, b;
};
using Sums = Pairs;

inline Sums all_of(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Pairs load_bytes(const char *from) {
  const auto *bytes = reinterpret_cast<const __m128i *>(from);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  const auto *words = reinterpret_cast<const __m256i *>(from);
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words), 4 * kNibble), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(words + 1), 4 * kNibble), mask)};
}
inline Sums add_products(Sums sums, Pairs weights, Pairs inputs) {
  return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(weights.a, inputs.a)),
          _mm256_add_epi32(sums.b, _mm256_madd_epi16(weights.b, inputs.b))};
}
inline Vec floats(Sums sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
inline Vec first_of(Pairs pairs) {
  return floats({_mm256_srai_epi32(_mm256_slli_epi32(pairs.a, 16), 16),
                 _mm256_srai_epi32(_mm256_slli_epi32(pairs.b, 16), 16)});
}
inline Vec second_of(Pairs pairs) {
  return floats({_mm256_srai_epi32(pairs.a, 16), _mm256_srai_epi32(pairs.b, 16)});
}
inline void store_integers(int16_t *to, Vec x) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(both, 0xd8));
}
#else
constexpr int kMostRows = 2, kMostNibbleRows = 2, kRowsOfWholeTiles = 1;
struct Pairs {
  int16_t v[32];
};
struct Sums {
  int32_t v[16];
};

inline Sums all_of(int32_t value) {
  Sums sums;
  for (int32_t &sum : sums.v) sum = value;
  return sums;
}
inline Pairs load_bytes(const char *from) {
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = static_cast<signed char>(from[i]);
  return pairs;
}
template <int kNibble>
inline Pairs load_nibbles(const char *from) {
  uint16_t words[32];
  std::memcpy(words, from, sizeof words);
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = static_cast<int16_t>(words[i] >> 4 * kNibble & 15);
  return pairs;
}
inline Sums add_products(Sums sums, const Pairs &weights, const Pairs &inputs) {
  for (int i = 0; i < 16; ++i)
    sums.v[i] += weights.v[2 * i] * inputs.v[2 * i] + weights.v[2 * i + 1] * inputs.v[2 * i + 1];
  return sums;
}
inline Vec floats(const Sums &sums) {
  return each([&](int i) { return static_cast<float>(sums.v[i]); });
}
inline Vec first_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i]); });
}
inline Vec second_of(const Pairs &pairs) {
  return each([&](int i) { return static_cast<float>(pairs.v[2 * i + 1]); });
}
inline void store_integers(int16_t *to, const Vec &x) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int16_t>(std::lrintf(x.v[i]));
}
#endif

#if !defined(__AVX512F__) && !defined(__AVX2__)
inline Pairs same_pair(const int16_t *pair) {
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.v[i] = pair[i % 2];
  return pairs;
}
#else
inline Pairs same_pair(const int16_t *pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return all_of(both);
}
#endif

inline Pairs load_integers(const int16_t *from) {
  Pairs pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}
inline Pairs all_ones() {
  const int16_t ones[2] = {1, 1};
  return same_pair(ones);
}
inline int32_t total_of(const Sums &sums) {
  int32_t each[16], sum = 0;
  std::memcpy(each, &sums, sizeof each);
  for (const int32_t one : each) sum += one;
  return sum;
}

// Formats of codes: eight inputs of a tile are kStepBytes, and pair kPair of them is read for 16
// outputs of one side; see weight_tiles.h.
struct Bytes {
  static constexpr int kRows = kMostRows;
  static constexpr int kStepBytes = 256;
  static constexpr int32_t kZero = 0;  // the code of nothing, where a group has no minimum
  template <int kPair>
  static Pairs pair(const char *step, int side) {
    return load_bytes(step + kPair * 64 + side * 32);
  }
};

struct Nibbles {
  static constexpr int kRows = kMostNibbleRows;  // whose groups are small: totals stay in registers
  static constexpr int kStepBytes = 128;
  static constexpr int32_t kZero = 8;
  template <int kPair>
  static Pairs pair(const char *step, int side) {
    return load_nibbles<kPair>(step + side * 64);
  }
};

constexpr int kStepInputs = 8;
constexpr int64_t kMostBlockInputs = 256;  // 32767 * 128 * 256 is within 32 bits
constexpr int kAheadBytes = 2048;

// Asks for what comes some steps later: codes stream by once.
template <class Codes>
inline void ask_ahead(const char *step) {
#pragma GCC unroll 4
  for (int line = 0; line < Codes::kStepBytes; line += 64)
    __builtin_prefetch(step + kAheadBytes + line, 0, 3);
}

// Inputs from begin on that have one scale, of the weight's and of a row's.
inline int64_t end_of_block(const ost_product &p, int64_t begin) {
  const int64_t group_end = (begin / p.group_size + 1) * p.group_size;
  return std::min({group_end, begin + kMostBlockInputs, int64_t{p.num_inputs}});
}

inline int64_t num_groups(const ost_product &p) {
  return (p.num_inputs + p.group_size - 1) / p.group_size;
}

// A number of each of 16 outputs.
inline Vec load_some(const void *numbers, int32_t dtype, int64_t place) {
  if (dtype == OST_FLOAT32) return load(static_cast<const float *>(numbers) + place);
  const auto *halves = static_cast<const uint16_t *>(numbers) + place;
  return dtype == OST_BFLOAT16 ? load_bfloat16(halves) : load_float16(halves);
}

// Rows as integers: by block, what one is worth, their sum, and what that is worth.
struct Rows {
  int16_t *integers;
  float *scales;
  int32_t *sums;
  float *totals;
  int64_t stride, block_stride;
};

// The largest of some numbers without their signs, as bits: what is no number is larger than all.
inline uint16_t largest_bits(const uint16_t *numbers, int64_t count) {
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i)
    most = std::max(most, static_cast<uint16_t>(numbers[i] & 0x7fff));
  return most;
}

// One block of a row, of which only count numbers are there. Where one is no number, the scale is none.
inline void make_integers(const uint16_t *numbers, int64_t count, int64_t padded,
                          int16_t *integers, float &scale, int32_t &sum) {
  constexpr uint16_t kLeast = 0x0d80, kInfinite = 0x7f80;  // 1e-30: what is less counts for nothing
  uint16_t some[kMostBlockInputs];
  if (count < padded) {
    std::memset(some, 0, sizeof some);
    if (count > 0) std::memcpy(some, numbers, static_cast<size_t>(count) * sizeof *some);
    numbers = some;
  }
  const uint16_t most = largest_bits(numbers, padded);
  const float size = float_of_bfloat16(most);
  const bool is_nothing = most < kLeast || most >= kInfinite;
  scale = most >= kInfinite ? NAN : size / 32767.f;
  const Vec factor = fill(is_nothing ? 0.f : 32767.f / size), limit = fill(32767.f);
  Sums sums = all_of(0);
  for (int64_t i = 0; i < padded; i += 32) {
    for (int64_t j = i; j < i + 32; j += 16) {
      const Vec x = load_bfloat16(numbers + j);
      store_integers(integers + j, is_nothing ? fill(0.f) : smaller(x * factor, limit));
    }
    sums = add_products(sums, load_integers(integers + i), all_ones());
  }
  sum = total_of(sums);
}

Rows integers_of(const ost_product &p) {
  const int64_t stride = p.num_inputs + 32, blocks = p.num_inputs / 32 + 1;
  const int64_t per_row = stride * 2 + blocks * 12;
  char *memory = static_cast<char *>(thread_scratch(per_row * p.num_rows));
  Rows rows{reinterpret_cast<int16_t *>(memory), nullptr, nullptr, nullptr, stride, blocks};
  rows.scales = reinterpret_cast<float *>(memory + stride * 2 * p.num_rows);
  rows.sums = reinterpret_cast<int32_t *>(rows.scales + blocks * p.num_rows);
  rows.totals = reinterpret_cast<float *>(rows.sums + blocks * p.num_rows);
  const auto *numbers = static_cast<const uint16_t *>(p.inputs.data);
  for (int64_t row = 0; row < p.num_rows; ++row) {
    int64_t block = row * blocks;
    for (int64_t begin = 0, end; begin < p.num_inputs; begin = end, ++block) {
      end = end_of_block(p, begin);
      make_integers(numbers + row * p.inputs.stride + begin, p.used_inputs - begin, end - begin,
                    rows.integers + row * stride + begin, rows.scales[block], rows.sums[block]);
      rows.totals[block] = rows.scales[block] * static_cast<float>(rows.sums[block]);
    }
  }
  return rows;
}

// The sums of some rows and kSides * 16 outputs of a tile, over a block.
template <class Codes, int kRows, int kSides>
struct Block {
  const int16_t *rows[kRows];
  Sums sums[kRows][kSides];

  template <int kPair>
  void add_pair(const char *step, int64_t input) {
    Pairs weights[kSides];
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) weights[side] = Codes::template pair<kPair>(step, side);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Pairs inputs = same_pair(rows[row] + input + 2 * kPair);
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[row][side] = add_products(sums[row][side], weights[side], inputs);
    }
  }
};

// A group of rows, and kSides * 16 outputs of a tile from the side `first` on.
template <class Codes, int kRows, int kSides>
inline void sum(const ost_product &p, const Rows &rows, int64_t first_row, int64_t tile, int first,
                Vec (&totals)[kRows][kSides]) {
  const int64_t side_bytes = first * (Codes::kStepBytes == 256 ? 32 : 64);
  const char *step = static_cast<const char *>(p.tiles) +
                     tile * (p.num_inputs / kStepInputs) * Codes::kStepBytes + side_bytes;
  int64_t place = tile * num_groups(p) * kTileOutputs + first * 16;
  Block<Codes, kRows, kSides> block;
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    block.rows[row] = rows.integers + (first_row + row) * rows.stride;
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) totals[row][side] = fill(0.f);
  }
  int64_t index = first_row * rows.block_stride;
  for (int64_t begin = 0, end; begin < p.num_inputs; begin = end, ++index) {
    end = end_of_block(p, begin);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const int32_t zero =
          p.minima == nullptr ? -Codes::kZero * rows.sums[index + row * rows.block_stride] : 0;
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side) block.sums[row][side] = all_of(zero);
    }
    for (int64_t i = begin; i < end; i += kStepInputs, step += Codes::kStepBytes) {
      ask_ahead<Codes>(step);
      block.template add_pair<0>(step, i);
      block.template add_pair<1>(step, i);
      block.template add_pair<2>(step, i);
      block.template add_pair<3>(step, i);
    }
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      const Vec scale = load_some(p.scales, p.scale_dtype, place + side * 16);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const float of_row = rows.scales[index + row * rows.block_stride];
        totals[row][side] = multiply_add(floats(block.sums[row][side]), scale * fill(of_row),
                                         totals[row][side]);
      }
      if (p.minima == nullptr) continue;
      const Vec minimum = load_some(p.minima, p.scale_dtype, place + side * 16);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const float inputs = rows.totals[index + row * rows.block_stride];
        totals[row][side] = multiply_add(minimum, fill(inputs), totals[row][side]);
      }
    }
    if (end % p.group_size == 0) place += kTileOutputs;
  }
}

// Finished sums of 16 outputs from `output` on.
inline void put(const ost_product &p, int64_t row, int64_t output, Vec value) {
  const int64_t left = std::min<int64_t>(16, p.num_outputs - output);
  if (left <= 0) return;
  const auto *bias = static_cast<const uint16_t *>(p.bias);
  auto *to = static_cast<uint16_t *>(p.outputs.data) + row * p.outputs.stride + output;
  uint16_t some[16] = {};
  if (bias != nullptr) {
    std::memcpy(some, bias + output, static_cast<size_t>(left) * sizeof *some);
    value = value + load_bfloat16(some);
  }
  if (left == 16) return store_bfloat16(to, value);
  store_bfloat16(some, value);
  std::memcpy(to, some, static_cast<size_t>(left) * sizeof *some);
}

template <class Codes, int kRows>
void multiply_group(const ost_product &p, const Rows &rows, int64_t first_row, int64_t tile) {
  constexpr int kSides = kRows <= kRowsOfWholeTiles ? 2 : 1;
  for (int first = 0; first < 2; first += kSides) {
    Vec totals[kRows][kSides];
    sum<Codes, kRows, kSides>(p, rows, first_row, tile, first, totals);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        put(p, first_row + row, tile * kTileOutputs + (first + side) * 16, totals[row][side]);
  }
}

using Group = void (*)(const ost_product &, const Rows &, int64_t, int64_t);

template <class Codes, int... kRows>
constexpr Group group_of(int num_rows, std::integer_sequence<int, kRows...>) {
  constexpr Group groups[] = {multiply_group<Codes, kRows + 1>...};
  return groups[num_rows - 1];
}

// Rows are cut evenly into groups of at most Codes::kRows.
template <class Codes>
void multiply(const ost_product &p, int64_t first, int64_t last) {
  const Rows rows = integers_of(p);
  const int64_t num_groups = (p.num_rows + Codes::kRows - 1) / Codes::kRows;
  for (int64_t tile = first; tile < last; ++tile)
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t begin = p.num_rows * group / num_groups;
      const int64_t end = p.num_rows * (group + 1) / num_groups;
      group_of<Codes>(static_cast<int>(end - begin),
                      std::make_integer_sequence<int, Codes::kRows>{})(p, rows, begin, tile);
    }
}

// Writes two neighbouring inputs of 16 outputs into a plain tile.
inline void put_pair(int32_t dtype, void *tile, int64_t input, int side, Vec first, Vec second) {
  if (dtype == OST_FLOAT32) {
    float *to = static_cast<float *>(tile) + input * kTileOutputs + side * 16;
    store(to, first);
    return store(to + kTileOutputs, second);
  }
  uint16_t *to = static_cast<uint16_t *>(tile) + input * kTileOutputs + side * 16;
  if (dtype == OST_FLOAT16) {
    store_float16(to, first);
    return store_float16(to + kTileOutputs, second);
  }
  to += side * 16;
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t places[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(places), both));
#else
  uint16_t halves[2][16];
  store_bfloat16(halves[0], first);
  store_bfloat16(halves[1], second);
  for (int i = 0; i < 32; ++i) to[i] = halves[i % 2][i / 2];
#endif
}

template <class Codes, int kPair>
inline void expand_pair(const ost_product &p, const char *step, int64_t input, int side, Vec scale,
                        Vec minimum, void *out) {
  const Pairs pairs = Codes::template pair<kPair>(step, side);
  const auto value = [&](Vec code, int64_t of) {
    return of < p.used_inputs ? multiply_add(code, scale, minimum) : fill(0.f);
  };
  input += 2 * kPair;
  put_pair(p.dtype, out, input, side, value(first_of(pairs), input),
           value(second_of(pairs), input + 1));
}

template <class Codes>
void expand(const ost_product &p, int64_t tile, void *out) {
  const char *step = static_cast<const char *>(p.tiles) +
                     tile * (p.num_inputs / kStepInputs) * Codes::kStepBytes;
  for (int64_t i = 0; i < p.num_inputs; i += kStepInputs, step += Codes::kStepBytes) {
    ask_ahead<Codes>(step);
    for (int side = 0; side < 2; ++side) {
      const int64_t place =
          (tile * num_groups(p) + i / p.group_size) * kTileOutputs + side * 16;
      const Vec scale = load_some(p.scales, p.scale_dtype, place);
      const Vec minimum = p.minima == nullptr ? scale * fill(-Codes::kZero)
                                              : load_some(p.minima, p.scale_dtype, place);
      expand_pair<Codes, 0>(p, step, i, side, scale, minimum, out);
      expand_pair<Codes, 1>(p, step, i, side, scale, minimum, out);
      expand_pair<Codes, 2>(p, step, i, side, scale, minimum, out);
      expand_pair<Codes, 3>(p, step, i, side, scale, minimum, out);
    }
  }
}

}  // namespace

CodeKernels OST_CODES(int32_t weight_format) {
  return weight_format == OST_INT8 ? CodeKernels{multiply<Bytes>, expand<Bytes>}
                                   : CodeKernels{multiply<Nibbles>, expand<Nibbles>};
}

}  // namespace ost
