// Blocks of two outputs and eight inputs of a weight, and rows as they meet them, by instruction set.
//
//     SMMLA, USMMLA   two rows and two outputs, eight inputs: 32 products
//     SDOT, UDOT      one row and two outputs, four inputs and the next four: 16 products
//
// Included after simd/simd.h; see weights/tiles.h for blocks.
#pragma once

#include "products/codes_rows.h"

#if defined(__ARM_FEATURE_DOTPROD) || !(defined(__AVX2__) || defined(OST_WITH_NEON))
#define OST_BLOCKS

namespace ost {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)
using BlockSum = int32x4_t;
using BlockInputs = int8x16_t;
using BlockCodes = int8x16_t;

inline BlockSum no_block_sum() { return vdupq_n_s32(0); }
inline BlockSum times_256(BlockSum sum) { return vshlq_n_s32(sum, 8); }
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kJoinedRows = 2, kBlockRows = 6;
constexpr bool kIsLowUnsigned = false;  // whether codes that meet lower bytes have no sign either

inline BlockInputs load_inputs(const int8_t *from) { return vld1q_s8(from); }
template <int kPlane>
inline BlockSum add_block(BlockSum sum, BlockInputs inputs, BlockCodes codes) {
  if constexpr (kPlane == 0) return vmmlaq_s32(sum, inputs, codes);
  return vusmmlaq_s32(sum, vreinterpretq_u8_s8(inputs), codes);
}
// A block has both outputs of the first row, then those of the second one.
inline Ints add_row(const Ints &sums, const BlockSum *blocks, int row) {
  return each_of_four<Ints>([&](int k) {
    const int64x2_t left = vreinterpretq_s64_s32(blocks[2 * k]);
    const int64x2_t right = vreinterpretq_s64_s32(blocks[2 * k + 1]);
    const int64x2_t own = row == 0 ? vzip1q_s64(left, right) : vzip2q_s64(left, right);
    return vaddq_s32(sums.v[k], vreinterpretq_s32_s64(own));
  });
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kJoinedRows = 1, kBlockRows = 3;
constexpr bool kIsLowUnsigned = true;

inline BlockInputs load_inputs(const int8_t *from) {
  int64_t eight;
  std::memcpy(&eight, from, sizeof eight);
  return vreinterpretq_s8_s64(vdupq_n_s64(eight));
}
template <int kPlane>
inline BlockSum add_block(BlockSum sum, BlockInputs inputs, BlockCodes codes) {
  if constexpr (kPlane == 0) return vdotq_s32(sum, codes, inputs);
  const uint8x16_t plain = vreinterpretq_u8_s8(codes);
  return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum), plain, vreinterpretq_u8_s8(inputs)));
}
inline Ints add_row(const Ints &sums, const BlockSum *blocks, int) {
  return each_of_four<Ints>(
      [&](int k) { return vaddq_s32(sums.v[k], vpaddq_s32(blocks[2 * k], blocks[2 * k + 1])); });
}
#else
constexpr int kJoinedRows = 1, kBlockRows = 2;
constexpr bool kIsLowUnsigned = false;

struct BlockSum {
  int32_t of_output[2];
};
using BlockInputs = const int8_t *;
struct BlockCodes {
  int8_t of_output[2][8];
};

inline BlockSum no_block_sum() { return {}; }
inline BlockSum times_256(const BlockSum &sum) { return {{sum.of_output[0] * 256, sum.of_output[1] * 256}}; }
inline BlockInputs load_inputs(const int8_t *from) { return from; }
template <int kPlane>
inline BlockSum add_block(BlockSum sum, BlockInputs inputs, const BlockCodes &codes) {
  for (int output = 0; output < 2; ++output)
    for (int i = 0; i < 8; ++i) {
      const int32_t input = kPlane == 0 ? inputs[i] : static_cast<uint8_t>(inputs[i]);
      sum.of_output[output] += codes.of_output[output][i] * input;
    }
  return sum;
}
inline Ints add_row(Ints sums, const BlockSum *blocks, int) {
  for (int i = 0; i < 16; ++i) sums.v[i] += blocks[i / 2].of_output[i % 2];
  return sums;
}
#endif

// Blocks k and 4 + k of a step.
struct BlockPair {
  BlockCodes first, second;
};

template <int kBits>
inline BlockPair load_pair(const char *step, int k) {
#if defined(__ARM_FEATURE_DOTPROD)
  const auto load = [=](int block) { return vld1q_s8(reinterpret_cast<const int8_t *>(step) + block * 16); };
  if constexpr (kBits == 8) return {load(k), load(4 + k)};
  const uint8x16_t both = vreinterpretq_u8_s8(load(k));
  return {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
#else
  BlockPair pair;
  for (int i = 0; i < 16; ++i) {
    const auto byte = static_cast<uint8_t>(step[k * 16 + i]);
    const auto next = static_cast<uint8_t>(step[kBits == 8 ? (4 + k) * 16 + i : k * 16 + i]);
    pair.first.of_output[i / 8][i % 8] = static_cast<int8_t>(kBits == 8 ? byte : byte & 15);
    pair.second.of_output[i / 8][i % 8] = static_cast<int8_t>(kBits == 8 ? next : next >> 4);
  }
  return pair;
#endif
}

// Codes with a sign, as integers of a plane meet them.
template <int kPlane>
inline BlockPair for_plane(const BlockPair &pair) {
#if defined(__ARM_FEATURE_DOTPROD)
  if constexpr (kPlane == 1 && kIsLowUnsigned)
    return {veorq_s8(pair.first, vdupq_n_s8(-128)), veorq_s8(pair.second, vdupq_n_s8(-128))};
#endif
  return pair;
}

// The formats; kPlanes is 1 for rows of 8 bits, and 2 for rows of 16.
template <int kPlanes_>
struct ByteBlocks {
  static constexpr int kBits = 8, kPlanes = kPlanes_, kRows = kBlockRows, kWholeRows = 0;
  static constexpr int kJoinedRows = ost::kJoinedRows, kTileBytes = 256, kStepBytes = 128;
  static constexpr int32_t kZero = 0, kLowMore = kPlanes == 2 && kIsLowUnsigned ? 128 : 0;
  static constexpr bool kStreams = true, kAreSmall = false;
  static int64_t side(const ost_product &p, int side) { return side * (p.num_inputs / kStepInputs) * kStepBytes; }
  template <int kPlane>
  static BlockPair load_blocks(const char *step, int k) {
    return for_plane<kPlane>(load_pair<8>(step, k));
  }
};

template <int kPlanes_>
struct NibbleBlocks : ByteBlocks<kPlanes_> {
  static constexpr int kBits = 4, kTileBytes = 128, kStepBytes = 64;
  static constexpr int32_t kZero = 8, kLowMore = 0;
  static int64_t side(const ost_product &p, int side) { return side * (p.num_inputs / kStepInputs) * kStepBytes; }
  template <int kPlane>
  static BlockPair load_blocks(const char *step, int k) {
    return load_pair<4>(step, k);
  }
};

inline BlockCodes look_up(const int8_t *table, BlockCodes places) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(places));
#else
  for (auto &output : places.of_output)
    for (int8_t &place : output) place = table[place];
  return places;
#endif
}

// Places in a table of numbers that have a sign, as bytes have.
template <class Table, int kPlanes>
struct TabledBlocks : NibbleBlocks<kPlanes> {
  static constexpr int32_t kZero = 0, kLowMore = ByteBlocks<kPlanes>::kLowMore;
  template <int kPlane>
  static BlockPair load_blocks(const char *step, int k) {
    const BlockPair places = load_pair<4>(step, k);
    return for_plane<kPlane>({look_up(Table::kNumbers, places.first), look_up(Table::kNumbers, places.second)});
  }
};

template <int kPlanes>
struct Mxfp4Blocks : TabledBlocks<Mxfp4, kPlanes> {};
template <int kPlanes>
struct Iq4Blocks : TabledBlocks<Iq4, kPlanes> {};

// Eight integers of a row as bytes; those of 16 bits, as upper and as lower ones.
inline void put_bytes(const int8_t *eight, int8_t *to, int64_t) { std::memcpy(to, eight, 8); }
inline void put_bytes(const int16_t *eight, int8_t *to, int64_t plane) {
  for (int i = 0; i < 8; ++i) {
    to[i] = static_cast<int8_t>(eight[i] >> 8);
    to[plane + i] = static_cast<int8_t>(eight[i] & 255);
  }
}

// Where codes without a sign are 128 more, sums of lower bytes begin with so much less.
inline void begin_lower(const ost_product &p, const Rows &rows, int64_t row, int32_t more) {
  const auto *integers = row_of<int16_t>(rows, row);
  int32_t *start = rows.starts + row * rows.marks;
  for (int64_t begin = 0, end; begin < p.num_inputs; begin = end, ++start) {
    end = end_of_block(p, begin);
    int32_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += integers[i] & 255;
    *start -= more * sum;
  }
}

// Rows as blocks meet them: [row / kJoinedRows][plane][input / 8][kJoinedRows][8], made once as integers_of
// makes them.
template <class Codes>
Rows rows_in_blocks(const ost_product &p) {
  using Integer = std::conditional_t<Codes::kPlanes == 1, int8_t, int16_t>;
  struct CachedIntegers {
    int64_t work = -1;
    const void *rows = nullptr;
    const int32_t *order = nullptr;
    Rows integers;
  };
  static thread_local CachedIntegers cached;
  if (cached.work == works_begun() && cached.rows == p.inputs.data && cached.order == p.order) return cached.integers;
  const Rows rows = integers_of<Integer>(p, p.zeros == nullptr && p.minima == nullptr ? Codes::kZero : 0);
  const int64_t num_rows = int64_t{p.num_rows} * rows.parts, plane = int64_t{p.num_inputs} * kJoinedRows;
  const int64_t groups = (num_rows + kJoinedRows - 1) / kJoinedRows, stride = plane * Codes::kPlanes + 64;
  auto *memory = static_cast<int8_t *>(tile_scratch(groups * stride));
  if (num_rows % kJoinedRows != 0) std::memset(memory + (groups - 1) * stride, 0, static_cast<size_t>(stride));
  for (int64_t row = 0; row < num_rows; ++row) {
    int8_t *to = memory + row / kJoinedRows * stride + row % kJoinedRows * 8;
    for (int64_t i = 0; i < p.num_inputs; i += 8)
      put_bytes(row_of<Integer>(rows, row) + i, to + i * kJoinedRows, plane);
    if constexpr (Codes::kLowMore != 0) begin_lower(p, rows, row, Codes::kLowMore);
  }
  cached = {works_begun(), p.inputs.data, p.order, rows};
  cached.integers.integers = reinterpret_cast<char *>(memory);
  cached.integers.stride = stride;
  return cached.integers;
}

}  // namespace
}  // namespace ost
#endif
