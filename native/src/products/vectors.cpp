// Products by vectors, compiled once for each instruction set; OST_PRODUCTS is the function that
// hands the kernels out.
//
// A group of rows meets a tile of the weight: each of its sums is a register, a step loads 32
// outputs of the weight once and one number (or pair) of each row:
//
//                     weight, 32 outputs of one input
//                     w00 ... w15   w16 ... w31
//     row 0   x0  ─►  sum           sum
//     row 1   x1  ─►  sum           sum          AVX-512: up to 12 rows; AVX2: up to 6, by halves
//     ...                                        of a tile
//
// A sum takes its inputs in order, whatever the number of rows, so that a row's outputs do not
// depend on the rows beside it. The first group streams the tile from memory and asks ahead; the
// others find it in the level 2 cache, and ask for the next tile meanwhile.
#include <cstring>
#include <type_traits>
#include <utility>

#include "products/numbers.h"
// after it
#include "products/kernels.h"
#include "threads/scratch.h"

namespace ost {

namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kRowsOfWholeTiles = 12;
#elif defined(__AVX2__) || defined(OST_WITH_NEON)
constexpr int kMaxRows = 6, kRowsOfWholeTiles = 3;
#else
constexpr int kMaxRows = 2, kRowsOfWholeTiles = 1;
#endif

constexpr int64_t kAheadBytes = 2048;  // further, and lines are gone again before they are needed

// How one format is multiplied. Widened rows are floats, others are as they were given; a step takes
// kInputs of them. From kBlockRows rows on, two and two of them are multiplied at once.
struct InFloat32 : Float32Numbers {
  using Input = float;
  static constexpr int kInputs = 1, kBlockRows = 0;
  static Vec weight(const float *tile) { return load(tile); }
  static Vec add(const Vec &sum, const Vec &weight, const float *input) {
    return add_plain_product(weight, fill(*input), sum);
  }
};

struct InFloat16 : Float16Numbers {
  using Input = float;
  static constexpr int kInputs = 1, kBlockRows = 0;
  static Vec weight(const uint16_t *tile) { return load_float16(tile); }
  static Vec add(const Vec &sum, const Vec &weight, const float *input) {
    return add_plain_product(weight, fill(*input), sum);
  }
};

#if defined(__AVX512BF16__)
struct InBFloat16 : BFloat16Numbers {
  using Input = uint16_t;
  static constexpr int kInputs = 2, kBlockRows = 0;
  static __m512bh weight(const uint16_t *tile) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile));
  }
  static Vec add(const Vec &sum, const __m512bh &weight, const uint16_t *pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return {_mm512_dpbf16_ps(sum.v, weight, reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits)))};
  }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Two products are rounded to odd, and so is their sum; what is below 2^-126 counts as zero.
struct InBFloat16 : BFloat16Numbers {
  using Input = uint16_t;
  static constexpr int kInputs = 2, kBlockRows = 3;
  struct Pairs {
    bfloat16x8_t v[4];
  };
  static bfloat16x8_t four(const uint16_t *from) { return vreinterpretq_bf16_u16(vld1q_u16(from)); }
  static Pairs weight(const uint16_t *tile) {
    return {{four(tile), four(tile + 8), four(tile + 16), four(tile + 24)}};
  }
  static Vec add(const Vec &sum, const Pairs &weight, const uint16_t *pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    const bfloat16x8_t inputs = vreinterpretq_bf16_s32(vdupq_n_s32(bits));
    return each_register([&](int k) { return vbfdotq_f32(sum.v[k], weight.v[k], inputs); });
  }
};
#else
struct InBFloat16 : BFloat16Numbers {
  using Input = float;
  static constexpr int kInputs = 2, kBlockRows = 0;
  struct Pairs {
    Vec first, second;
  };
  static Pairs weight(const uint16_t *tile) {
    Pairs pairs;
    load_pairs(tile, pairs.first, pairs.second);
    return pairs;
  }
  static Vec add(const Vec &sum, const Pairs &weight, const float *pair) {
    const Vec half = add_plain_product(weight.first, fill(pair[0]), sum);
    return add_plain_product(weight.second, fill(pair[1]), half);
  }
};
#endif

// Lines that are asked for in each step, of two that a step of most formats reads.
struct Ahead {
  const char *line;
  int64_t to_second, per_step;
};

inline void prefetch_line(const char *line) { __builtin_prefetch(line, 0, 3); }

// Rows as kernels read them: their own, or widened.
template <class Format>
struct Inputs {
  const typename Format::Input *data;
  int64_t stride;
};

// Adds to sums of kRows rows for kSides * 16 outputs of a tile.
template <class Format, int kRows, int kSides>
inline void sum(const Inputs<Format> &inputs, const typename Format::Stored *tile,
                int64_t num_inputs, Ahead ahead, Vec (&sums)[kRows][kSides]) {
  constexpr int kInputs = Format::kInputs, kSide = 16 * kInputs;
  const typename Format::Input *rows[kRows];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) rows[row] = inputs.data + row * inputs.stride;
  for (int64_t i = 0; i < num_inputs; i += kInputs, tile += kTileOutputs * kInputs) {
    prefetch_line(ahead.line);
    prefetch_line(ahead.line + ahead.to_second);
    ahead.line += ahead.per_step;
    decltype(Format::weight(tile)) weights[kSides];
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) weights[side] = Format::weight(tile + side * kSide);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[row][side] = Format::add(sums[row][side], weights[side], rows[row] + i);
  }
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// BFMMLA multiplies two rows with two outputs of four inputs, as two steps of BFDOT one after the other: the
// bits are the same. A sum is two outputs of a row, then those of the next one. Two pairs of lines of a tile
// are its operands, zipped.
template <int kRows>
inline void sum_by_blocks(const Inputs<InBFloat16> &inputs, const uint16_t *tile, int64_t num_inputs, Ahead ahead,
                          Vec (&sums)[kRows][1]) {
  constexpr int kPairs = (kRows + 1) / 2;
  const uint16_t *rows[2 * kPairs];
#pragma GCC unroll 16
  for (int row = 0; row < 2 * kPairs; ++row)
    rows[row] = inputs.data + std::min(row, kRows - 1) * inputs.stride;  // the last one may stand for none
  float32x4_t blocks[kPairs][8];
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const Vec &upper = sums[2 * pair][0], &lower = sums[std::min(2 * pair + 1, kRows - 1)][0];
      const auto half = [=](float32x4_t four) { return k % 2 ? vget_high_f32(four) : vget_low_f32(four); };
      blocks[pair][k] = vcombine_f32(half(upper.v[k / 2]), half(lower.v[k / 2]));
    }
  for (int64_t i = 0; i < num_inputs; i += 4, tile += kTileOutputs * 4) {
    for (int line = 0; line < 2; ++line) {
      prefetch_line(ahead.line);
      prefetch_line(ahead.line + ahead.to_second);
      ahead.line += ahead.per_step;
    }
    bfloat16x8_t own[kPairs];
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair)
      own[pair] = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(rows[2 * pair] + i), vld1_u16(rows[2 * pair + 1] + i)));
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const uint32x4_t first = vreinterpretq_u32_u16(vld1q_u16(tile + 8 * k));
      const uint32x4_t second = vreinterpretq_u32_u16(vld1q_u16(tile + 2 * kTileOutputs + 8 * k));
      const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
      const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) {
        blocks[pair][2 * k] = vbfmmlaq_f32(blocks[pair][2 * k], own[pair], low);
        blocks[pair][2 * k + 1] = vbfmmlaq_f32(blocks[pair][2 * k + 1], own[pair], high);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    sums[row][0] = each_register([&](int k) {
      const float64x2_t left = vreinterpretq_f64_f32(blocks[row / 2][2 * k]);
      const float64x2_t right = vreinterpretq_f64_f32(blocks[row / 2][2 * k + 1]);
      return vreinterpretq_f32_f64(row % 2 ? vzip2q_f64(left, right) : vzip1q_f64(left, right));
    });
}
#endif

// A group of rows and a piece of a tile.
template <class Format, int kRows>
void multiply_group(const ost_product &p, const Inputs<Format> &inputs, int64_t first_row,
                    const TilePiece &piece, Ahead ahead) {
  constexpr bool is_by_blocks = Format::kBlockRows != 0 && kRows >= Format::kBlockRows;
  constexpr int kSides = kRows <= kRowsOfWholeTiles && !is_by_blocks ? 2 : 1;
  const auto *weights = static_cast<const typename Format::Stored *>(piece.weights);
  const Inputs<Format> own{inputs.data + first_row * inputs.stride, inputs.stride};
  const bool begins = piece.first_input == 0;
  const bool ends = piece.first_input + piece.num_inputs == p.num_inputs;
  for (int first = 0; first < 2; first += kSides) {
    float *kept = piece.sums + first_row * kTileOutputs + first * 16;
    Vec sums[kRows][kSides];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[row][side] = begins ? fill(0.f) : load(kept + row * kTileOutputs + side * 16);
    const auto *side = weights + first * 16 * Format::kInputs;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if constexpr (is_by_blocks) sum_by_blocks<kRows>(own, side, piece.num_inputs, ahead, sums);
    else
#endif
      sum<Format, kRows, kSides>(own, side, piece.num_inputs, ahead, sums);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side) {
        const int64_t output = piece.tile * kTileOutputs + (first + side) * 16;
        if (ends) put<Format>(p, first_row + row, output, sums[row][side]);
        else store(kept + row * kTileOutputs + side * 16, sums[row][side]);
      }
  }
}

template <class Format>
using Group = void (*)(const ost_product &, const Inputs<Format> &, int64_t, const TilePiece &, Ahead);

template <class Format, int... kRows>
constexpr Group<Format> group_of(int num_rows, std::integer_sequence<int, kRows...>) {
  constexpr Group<Format> groups[] = {multiply_group<Format, kRows + 1>...};
  return groups[num_rows - 1];
}

// What a group asks for: alone, what it meets itself; of several, the first two ask for the next tile.
// Pieces were written right before.
template <class Format>
Ahead ahead_of(const ost_product &p, const TilePiece &piece, int64_t group, int64_t num_groups) {
  const int64_t step_bytes = kTileOutputs * Format::kInputs * sizeof(typename Format::Stored);
  const int64_t tile_bytes = step_bytes / Format::kInputs * p.num_inputs;
  const char *own = static_cast<const char *>(piece.weights);
  if (piece.sums != nullptr) return {own, 0, 0};
  if (num_groups == 1) return {own + kAheadBytes, step_bytes - 64, step_bytes};
  if (group > 1) return {own, 0, 0};
  return {own + tile_bytes + group * tile_bytes / 2, 0, step_bytes / 2};
}

// Rows are cut evenly into groups of at most kMaxRows.
template <class Format>
void multiply_piece(const ost_product &p, const Inputs<Format> &inputs, const TilePiece &piece) {
  const int64_t num_groups = (p.num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = p.num_rows * group / num_groups;
    const int64_t last = p.num_rows * (group + 1) / num_groups;
    const auto multiply = group_of<Format>(static_cast<int>(last - first),
                                           std::make_integer_sequence<int, kMaxRows>{});
    multiply(p, inputs, first, piece, ahead_of<Format>(p, piece, group, num_groups));
  }
}

// Widening takes next to nothing of the time that all outputs of a piece take.
template <class Format>
Inputs<Format> widened(const ost_product &p, int64_t first, int64_t count) {
  const int64_t stride = count + 16;  // rows do not crowd in few places of the cache
  auto *floats = static_cast<float *>(thread_scratch(stride * p.num_rows * 4));
  const auto *rows = static_cast<const typename Format::Stored *>(p.inputs.data) + first;
  for (int64_t row = 0; row < p.num_rows; ++row)
    for (int64_t i = 0; i < count; i += 16)
      store(floats + row * stride + i, Format::load_numbers(rows + row * p.inputs.stride + i));
  return {floats, stride};
}

// All rows' inputs from one on.
template <class Format>
Inputs<Format> inputs_of(const ost_product &p, int64_t first, int64_t count) {
  using Input = typename Format::Input;
  if constexpr (std::is_same_v<typename Format::Stored, Input>)
    return {static_cast<const Input *>(p.inputs.data) + first, p.inputs.stride};
  else
    return widened<Format>(p, first, count);
}

template <class Format>
void multiply(const ost_product &p, int64_t first, int64_t last) {
  const auto inputs = inputs_of<Format>(p, 0, p.num_inputs);
  const auto *tiles = static_cast<const typename Format::Stored *>(p.tiles);
  for (int64_t tile = first; tile < last; ++tile)
    multiply_piece(p, inputs,
                   {tiles + tile * kTileOutputs * p.num_inputs, tile, 0, p.num_inputs, nullptr});
}

template <class Format>
void add_piece(const ost_product &p, const TilePiece &piece) {
  multiply_piece(p, inputs_of<Format>(p, piece.first_input, piece.num_inputs), piece);
}

template <class Format>
constexpr PlainKernels kKernels{multiply<Format>, add_piece<Format>};

}  // namespace

PlainKernels OST_PRODUCTS(int32_t dtype) {
  return dtype == OST_FLOAT32    ? kKernels<InFloat32>
         : dtype == OST_BFLOAT16 ? kKernels<InBFloat16>
                                 : kKernels<InFloat16>;
}

}  // namespace ost
