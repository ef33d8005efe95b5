// What rows of a weight become codes from: blocks of a GGUF file, plain numbers, or bytes.
//
// A chunk is 32 inputs of a row, which is a group of most blocks, and two groups of some. A kind has
//
//     kBits, kZero         bits of its own codes, and which of them is zero where there is no minimum
//     Scale                of a group, or of the groups of a chunk
//     begin(...)           at the first chunk of a group: its scale
//     codes(...)           a chunk's codes, in bytes
//
// Layouts: ggml-common.h of llama.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "weights/code_tables.h"
#include "simd/formats.h"
#include "weights/tiles.h"

namespace ost {

constexpr int64_t kChunk = 32;
constexpr int64_t kChunksPerSuper = 8;  // of blocks of 256

struct GroupScale {
  float scale, minimum;
  GroupScale of_part(int64_t) const { return *this; }
};

// Of the groups of a chunk in a block of 256: bytes, and what they are times. Groups of 32 are both parts.
struct SuperScale {
  uint16_t factor, minimum_factor;  // float16
  int8_t scales[2], minima[2];
  GroupScale of_part(int64_t part) const {
    return {float_of_float16(factor) * static_cast<float>(scales[part]),
            float_of_float16(minimum_factor) * static_cast<float>(minima[part])};
  }
};

inline uint16_t half_bits_at(const uint8_t *bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half;
}

inline float half_at(const uint8_t *bytes) { return float_of_float16(half_bits_at(bytes)); }

// Low halves of 16 bytes, then their high halves.
inline void split_nibbles(const uint8_t *bytes, uint8_t *codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

template <int kBlockBytes, int kBits_, int32_t kZero_>
struct SmallBlocks {
  using Scale = GroupScale;
  static constexpr int kBits = kBits_;
  static constexpr int32_t kZero = kZero_;
  static const uint8_t *block(const uint8_t *row, int64_t chunk) { return row + chunk * kBlockBytes; }
};

struct Q40 : SmallBlocks<18, 4, 8> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), 0.f};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 2, out);
  }
};

struct Q41 : SmallBlocks<20, 4, 0> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), half_at(block(row, chunk) + 2)};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 4, out);
  }
};

// Bit i of a word becomes the fifth bit of code i.
inline void add_fifth_bits(const uint8_t *word, uint8_t *codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= (word[i / 8] >> (i % 8) & 1) << 4;
}

struct Q50 : SmallBlocks<22, 8, 0> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), 0.f};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 6, out);
    add_fifth_bits(block(row, chunk) + 2, out);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] - 16);
  }
};

struct Q51 : SmallBlocks<24, 8, 0> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), half_at(block(row, chunk) + 2)};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 8, out);
    add_fifth_bits(block(row, chunk) + 4, out);
  }
};

struct Q80 : SmallBlocks<34, 8, 0> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), 0.f};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    std::memcpy(out, block(row, chunk) + 2, kChunk);
  }
};

// Places in a table become its numbers, unless they are what the weight has.
template <class Table>
inline void look_up(const ost_code_packing &p, uint8_t *codes) {
  if (has_table(p.weight_format)) return;
  for (int i = 0; i < kChunk; ++i) codes[i] = static_cast<uint8_t>(Table::kNumbers[codes[i]]);
}

struct IQ4NL : SmallBlocks<18, 8, 0> {
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    return {half_at(block(row, chunk)), 0.f};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 2, out);
    look_up<Iq4>(p, out);
  }
};

// The exponent of a power of two, then nibbles: a sign, and the place among the sizes of E2M1.
template <bool kAreNeighbours>
struct MXFP4 : SmallBlocks<17, 8, 0> {
  using SmallBlocks<17, 8, 0>::block;
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint32_t exponent = *block(row, chunk);  // half of 2 to the (exponent - 127)
    return {float_of_bits(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23), 0.f};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    const uint8_t *bytes = block(row, chunk) + 1;
    uint8_t nibbles[kChunk];
    split_nibbles(bytes, nibbles);
    for (int i = 0; i < kChunk; ++i) {
      const uint8_t nibble = nibbles[kAreNeighbours ? i % 2 * 16 + i / 2 : i];
      out[i] = nibble < 8 ? 8 + nibble : 15 - nibble;
    }
    look_up<Mxfp4>(p, out);
  }
};

// Blocks of 256 inputs.
template <int kBlockBytes, int kBits_, int32_t kZero_ = 0>
struct SuperBlocks {
  using Scale = SuperScale;
  static constexpr int kBits = kBits_;
  static constexpr int32_t kZero = kZero_;
  static const uint8_t *block(const uint8_t *row, int64_t chunk) {
    return row + chunk / kChunksPerSuper * kBlockBytes;
  }
  // Codes of two bits: of each half of a block, four chunks share 32 bytes.
  static void two_bits(const uint8_t *from, int64_t group, uint8_t *out) {
    const int shift = static_cast<int>(2 * (group % 4));
    for (int i = 0; i < kChunk; ++i) out[i] = from[group / 4 * 32 + i] >> shift & 3;
  }
};

// Two halves, twelve bytes with scales and minima of 6 bits, further bits, nibbles.
template <int kBlockBytes, int kBits_>
struct SixBitScales : SuperBlocks<kBlockBytes, kBits_> {
  static SuperScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = SuperBlocks<kBlockBytes, kBits_>::block(row, chunk), *six = from + 4;
    const int64_t group = chunk % kChunksPerSuper;
    int32_t scale, minimum;
    if (group < 4) {
      scale = six[group] & 63;
      minimum = six[group + 4] & 63;
    } else {
      scale = (six[group + 4] & 15) | (six[group - 4] >> 6) << 4;
      minimum = six[group + 4] >> 4 | (six[group] >> 6) << 4;
    }
    const auto own = static_cast<int8_t>(scale), less = static_cast<int8_t>(-minimum);
    return {half_bits_at(from), half_bits_at(from + 2), {own, own}, {less, less}};
  }
  // The last 128 bytes: each 32 of them have two groups.
  static void nibbles(const uint8_t *row, int64_t chunk, uint8_t *out) {
    const int64_t group = chunk % kChunksPerSuper;
    const uint8_t *block = SuperBlocks<kBlockBytes, kBits_>::block(row, chunk);
    const uint8_t *from = block + kBlockBytes - 128 + group / 2 * 32;
    const int shift = group % 2 == 0 ? 0 : 4;
    for (int i = 0; i < kChunk; ++i) out[i] = from[i] >> shift & 15;
  }
};

struct Q4K : SixBitScales<144, 4> {
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    nibbles(row, chunk, out);
  }
};

struct Q5K : SixBitScales<176, 8> {
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    nibbles(row, chunk, out);
    const uint8_t *high = block(row, chunk) + 16;
    const int shift = static_cast<int>(chunk % kChunksPerSuper);
    for (int i = 0; i < kChunk; ++i) out[i] |= (high[i] >> shift & 1) << 4;
  }
};

// Nibbles of 16 groups, scale and minimum in a byte; codes of two bits; two halves.
struct Q2K : SuperBlocks<84, 4> {
  static SuperScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = block(row, chunk), *both = from + chunk % kChunksPerSuper * 2;
    const auto minimum = [&](int part) { return static_cast<int8_t>(-(both[part] >> 4)); };
    return {half_bits_at(from + 80),
            half_bits_at(from + 82),
            {static_cast<int8_t>(both[0] & 15), static_cast<int8_t>(both[1] & 15)},
            {minimum(0), minimum(1)}};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    two_bits(block(row, chunk) + 16, chunk % kChunksPerSuper, out);
  }
};

// A third bit of each code, two bits, twelve bytes with scales of 6 bits, a half.
struct Q3K : SuperBlocks<110, 4, 8> {
  static SuperScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = block(row, chunk), *six = from + 96;
    const auto scale = [&](int64_t group) {
      const int32_t low = six[group % 8] >> (group < 8 ? 0 : 4) & 15;
      const int32_t high = six[8 + group % 4] >> group / 4 * 2 & 3;
      return static_cast<int8_t>((low | high << 4) - 32);
    };
    const int64_t group = chunk % kChunksPerSuper * 2;
    return {half_bits_at(from + 108), 0, {scale(group), scale(group + 1)}, {0, 0}};
  }
  // Of -4 .. 3, as codes whose zero is 8.
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    const uint8_t *third = block(row, chunk);
    const int shift = static_cast<int>(chunk % kChunksPerSuper);
    two_bits(third + 32, chunk % kChunksPerSuper, out);
    for (int i = 0; i < kChunk; ++i)
      out[i] = static_cast<uint8_t>(out[i] + 4 + (third[i] >> shift & 1) * 4);
  }
};

// Four bits of each code, two further bits, 16 scales, a half.
struct Q6K : SuperBlocks<210, 8> {
  static SuperScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = block(row, chunk), *own = from + 192 + chunk % kChunksPerSuper * 2;
    const auto first = static_cast<int8_t>(own[0]), second = static_cast<int8_t>(own[1]);
    return {half_bits_at(from + 208), 0, {first, second}, {0, 0}};
  }
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    const int64_t group = chunk % kChunksPerSuper, half = group / 4, part = group % 4;
    const uint8_t *low = block(row, chunk) + half * 64 + part % 2 * 32;
    const int shift = part < 2 ? 0 : 4;
    two_bits(block(row, chunk) + 128, group, out);
    for (int i = 0; i < kChunk; ++i)
      out[i] = static_cast<uint8_t>((low[i] >> shift & 15 | out[i] << 4) - 32);
  }
};

// A half, scales of 6 bits: their high bits in two bytes, their low ones in four; nibbles.
struct IQ4XS : SuperBlocks<136, 8> {
  static SuperScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = block(row, chunk);
    const auto group = static_cast<int>(chunk % kChunksPerSuper);
    const int32_t low = from[4 + group / 2] >> group % 2 * 4 & 15;
    const int32_t high = half_bits_at(from + 2) >> 2 * group & 3;
    const auto own = static_cast<int8_t>((low | high << 4) - 32);
    return {half_bits_at(from), 0, {own, own}, {0, 0}};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, SuperScale,
                    uint8_t *out) {
    split_nibbles(block(row, chunk) + 8 + chunk % kChunksPerSuper * 16, out);
    look_up<Iq4>(p, out);
  }
};

// The nearest codes.

// The largest size of numbers; NaN where one is.
inline float largest_size(const float *numbers, int64_t count, float sofar) {
  uint32_t bits = bits_of_float(sofar);
  for (int64_t i = 0; i < count; ++i)
    bits = std::max(bits, bits_of_float(numbers[i]) & 0x7fffffffu);  // NaN is above infinity
  return float_of_bits(bits);
}

// Rounded up to bfloat16, so that no number is clipped.
inline float bfloat16_above(float scale) {
  const uint16_t rounded = bfloat16_of_float(scale);
  const float value = float_of_bfloat16(rounded);
  return value < scale ? float_of_bfloat16(static_cast<uint16_t>(rounded + 1)) : value;
}

// To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no bits behind the point.
inline float to_integer(float number) {
  constexpr float kShift = 12582912.f;
  return (number + kShift) - kShift;
}

inline void nearest_codes(const float *numbers, GroupScale group, int32_t lowest, int32_t highest,
                          uint8_t *out) {
  if (!(group.scale > 0.f) || group.scale > std::numeric_limits<float>::max()) {
    std::fill_n(out, kChunk, uint8_t{0});  // what is not finite stays so by its scale
    return;
  }
  const auto low = static_cast<float>(lowest), high = static_cast<float>(highest);
  for (int i = 0; i < kChunk; ++i) {
    const float code = to_integer((numbers[i] - group.minimum) / group.scale);
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(std::min(std::max(code, low), high)));
  }
}

// Plain numbers; of the last group's inputs, those that are missing are 0.
struct Numbers {
  using Scale = GroupScale;
  static constexpr int kBits = 0;  // those of the format
  static constexpr int32_t kZero = 0;
  static int64_t load(const ost_code_packing &p, const uint8_t *row, int64_t chunk, float *out) {
    const int64_t first = chunk * kChunk;
    const int64_t count = std::clamp<int64_t>(p.num_inputs - first, 0, kChunk);
    std::fill_n(out, kChunk, 0.f);
    if (p.dtype == OST_BFLOAT16) {
      for (int64_t i = 0; i < count; ++i)
        out[i] = float_of_bfloat16(reinterpret_cast<const uint16_t *>(row)[first + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = load_element(row, p.dtype, first + i);
    }
    return count;
  }
  static GroupScale begin(const ost_code_packing &p, const uint8_t *row, int64_t chunk) {
    float own[kChunk], size = 0.f, lowest = 0.f, highest = 0.f;
    const int64_t num_chunks = p.group_size / kChunk;
    for (int64_t i = 0; i < num_chunks; ++i) {
      load(p, row, chunk + i, own);
      size = largest_size(own, kChunk, size);
      if (i == 0) lowest = highest = own[0];
      for (const float number : own) {
        lowest = std::min(lowest, number);
        highest = std::max(highest, number);
      }
    }
    if (p.minima == nullptr) return {bfloat16_above(size / 127.f), 0.f};
    const float minimum = float_of_bfloat16(bfloat16_of_float(lowest));
    const float steps = bits_of_codes(p.weight_format) == 4 ? 15.f : 127.f;
    const float span = std::max(highest - minimum, 0.f) / steps;
    return {bfloat16_above(size != size ? size : span), minimum};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale group,
                    uint8_t *out) {
    float own[kChunk];
    const int64_t count = load(p, row, chunk, own);
    const bool is_small = bits_of_codes(p.weight_format) == 4;
    nearest_codes(own, group, is_small ? 0 : -128, is_small ? 15 : 127, out);
    std::fill(out + count, out + kChunk, static_cast<uint8_t>(p.padding));
  }
};

// Codes in bytes, without scales.
struct Codes {
  using Scale = GroupScale;
  static constexpr int kBits = 0;
  static constexpr int32_t kZero = 0;
  static GroupScale begin(const ost_code_packing &, const uint8_t *, int64_t) { return {0.f, 0.f}; }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    const int64_t first = chunk * kChunk;
    const int64_t count = std::clamp<int64_t>(p.num_inputs - first, 0, kChunk);
    std::memcpy(out, row + first, static_cast<size_t>(count));
    std::fill(out + count, out + kChunk, static_cast<uint8_t>(p.padding));
  }
};

}  // namespace ost
