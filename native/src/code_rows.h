// What rows of a weight become codes from: blocks of a GGUF file, plain numbers, or bytes.
//
// A chunk is 32 inputs of a row, which is a group of most blocks. A kind has
//
//     kBits, kZero         bits of its own codes, and which of them is zero where there is no minimum
//     begin(...)           at the first chunk of a group: its scale and minimum
//     codes(...)           a chunk's codes, in bytes
//
// Blocks whose groups have 16 inputs become numbers first, rounded to the compute dtype, and then the
// nearest codes, as codes.py has them. Layouts: ggml-common.h of llama.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "formats.h"
#include "ostinato_ops.h"

namespace ost {

constexpr int64_t kChunk = 32;
constexpr int64_t kChunksPerSuper = 8;  // of blocks of 256

struct GroupScale {
  float scale, minimum;
};

inline float half_at(const uint8_t *bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return float_of_float16(half);
}

// Low halves of 16 bytes, then their high halves.
inline void split_nibbles(const uint8_t *bytes, uint8_t *codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

template <int kBlockBytes, int kBits_, int32_t kZero_>
struct SmallBlocks {
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

// Blocks of 256 inputs: two halves, twelve bytes with scales and minima of 6 bits, further bits, nibbles.
template <int kBlockBytes, int kBits_>
struct SuperBlocks {
  static constexpr int kBits = kBits_;
  static constexpr int32_t kZero = 0;
  static const uint8_t *block(const uint8_t *row, int64_t chunk) {
    return row + chunk / kChunksPerSuper * kBlockBytes;
  }
  static GroupScale begin(const ost_code_packing &, const uint8_t *row, int64_t chunk) {
    const uint8_t *from = block(row, chunk), *six = from + 4;
    const int64_t group = chunk % kChunksPerSuper;
    int32_t scale, minimum;
    if (group < 4) {
      scale = six[group] & 63;
      minimum = six[group + 4] & 63;
    } else {
      scale = (six[group + 4] & 15) | (six[group - 4] >> 6) << 4;
      minimum = six[group + 4] >> 4 | (six[group] >> 6) << 4;
    }
    return {half_at(from) * static_cast<float>(scale),
            -(half_at(from + 2) * static_cast<float>(minimum))};
  }
  // The last 128 bytes: each 32 of them have two groups.
  static void nibbles(const uint8_t *row, int64_t chunk, uint8_t *out) {
    const int64_t group = chunk % kChunksPerSuper;
    const uint8_t *from = block(row, chunk) + kBlockBytes - 128 + group / 2 * 32;
    const int shift = group % 2 == 0 ? 0 : 4;
    for (int i = 0; i < 32; ++i) out[i] = from[i] >> shift & 15;
  }
};

struct Q4K : SuperBlocks<144, 4> {
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    nibbles(row, chunk, out);
  }
};

struct Q5K : SuperBlocks<176, 8> {
  static void codes(const ost_code_packing &, const uint8_t *row, int64_t chunk, GroupScale,
                    uint8_t *out) {
    nibbles(row, chunk, out);
    const uint8_t *high = block(row, chunk) + 16;
    const int shift = static_cast<int>(chunk % kChunksPerSuper);
    for (int i = 0; i < 32; ++i) out[i] |= (high[i] >> shift & 1) << 4;
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

inline float rounded_to(float number, int32_t dtype) {
  if (dtype == OST_BFLOAT16) return float_of_bfloat16(bfloat16_of_float(number));
  if (dtype == OST_FLOAT16) return float_of_float16(float16_of_float(number));
  return number;
}

struct Q6K {
  static constexpr int kBits = 8;
  static constexpr int32_t kZero = 0;
  static void numbers(const ost_code_packing &p, const uint8_t *row, int64_t chunk, float *out) {
    const uint8_t *block = row + chunk / kChunksPerSuper * 210;
    const int64_t half = chunk % kChunksPerSuper / 4, part = chunk % 4;
    const uint8_t *low = block + half * 64 + part % 2 * 32, *high = block + 128 + half * 32;
    const uint8_t *scales = block + 192 + half * 8 + part * 2;
    const int low_shift = part < 2 ? 0 : 4, high_shift = static_cast<int>(2 * part);
    const float all = half_at(block + 208);
    const float two[] = {all * static_cast<float>(static_cast<int8_t>(scales[0])),
                         all * static_cast<float>(static_cast<int8_t>(scales[1]))};
    for (int i = 0; i < 32; ++i) {
      const int32_t code = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
      out[i] = two[i / 16] * static_cast<float>(code - 32);
    }
    if (p.dtype != OST_FLOAT32)
      for (int i = 0; i < 32; ++i) out[i] = rounded_to(out[i], p.dtype);
  }
  static GroupScale begin(const ost_code_packing &p, const uint8_t *row, int64_t chunk) {
    float own[kChunk];
    numbers(p, row, chunk, own);
    return {bfloat16_above(largest_size(own, kChunk, 0.f) / 127.f), 0.f};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale group,
                    uint8_t *out) {
    float own[kChunk];
    numbers(p, row, chunk, own);
    nearest_codes(own, group, -128, 127, out);
  }
};

// Plain numbers; of the last group's inputs, those that are missing are 0.
struct Numbers {
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
    const float steps = p.weight_format == OST_INT4 ? 15.f : 127.f;
    const float span = std::max(highest - minimum, 0.f) / steps;
    return {bfloat16_above(size != size ? size : span), minimum};
  }
  static void codes(const ost_code_packing &p, const uint8_t *row, int64_t chunk, GroupScale group,
                    uint8_t *out) {
    float own[kChunk];
    const int64_t count = load(p, row, chunk, own);
    const bool is_small = p.weight_format == OST_INT4;
    nearest_codes(own, group, is_small ? 0 : -128, is_small ? 15 : 127, out);
    std::fill(out + count, out + kChunk, static_cast<uint8_t>(p.padding));
  }
};

// Codes in bytes, without scales.
struct Codes {
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
