// Codes of a tile in other forms: as bytes that many rows of 8 bits are multiplied with, or as plain numbers.
#pragma once

#include "products/codes_formats.h"

namespace ost {
namespace {

#if defined(OST_QUADS)
template <class Codes>
inline void unpack_quads(const char *step, char *out) {
  const auto put = [&](Pairs first, Pairs second, int dot, int side) {
    store_quads(out + dot * 128 + side * 64, quads_of(first, second, Codes::kMore));
  };
  for (int side = 0; side < 2; ++side) {
    put(Codes::template load<0>(step, side), Codes::template load<1>(step, side), 0, side);
    put(Codes::template load<2>(step, side), Codes::template load<3>(step, side), 1, side);
  }
}
#endif

// Writes an input of 16 outputs into a plain tile; `tile` begins with input 0.
inline void put_input(int32_t dtype, void *tile, int64_t input, int side, Vec value) {
  if (dtype == OST_FLOAT32)
    return store(static_cast<float *>(tile) + input * kTileOutputs + side * 16, value);
  uint16_t *to = static_cast<uint16_t *>(tile);
  if (dtype == OST_FLOAT16) return store_float16(to + input * kTileOutputs + side * 16, value);
  uint16_t halves[16];
  store_bfloat16(halves, value);
  to += (input / 2 * kTileOutputs + side * 16) * 2 + input % 2;
  for (int i = 0; i < 16; ++i) to[2 * i] = halves[i];
}

// Likewise two neighbouring inputs.
inline void put_pair(int32_t dtype, void *tile, int64_t input, int side, Vec first, Vec second) {
#if defined(__AVX512BF16__)
  if (dtype == OST_BFLOAT16) {
    alignas(64) static constexpr uint16_t places[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                        21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                        11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
    return _mm512_storeu_si512(static_cast<uint16_t *>(tile) + input * kTileOutputs + side * 32,
                               _mm512_permutexvar_epi16(_mm512_load_si512(places), both));
  }
#endif
  put_input(dtype, tile, input, side, first);
  put_input(dtype, tile, input + 1, side, second);
}

// Scales of 16 outputs of a group, and what is added to a code times its scale.
struct GroupNumbers {
  Vec scale, minimum;
};

// A pair of inputs, of which all are used and in order.
template <class Codes, int kPair>
inline void expand_plain(const ost_product &p, const char *step, int64_t input, int side, const GroupNumbers &s,
                         void *out) {
  const Pairs pairs = Codes::template load<kPair>(step, side);
  put_pair(p.dtype, out, input + 2 * kPair, side, multiply_add(first_of(pairs), s.scale, s.minimum),
           multiply_add(second_of(pairs), s.scale, s.minimum));
}

template <class Codes, int kPair>
inline void expand_any(const ost_product &p, const char *step, int64_t input, int64_t before, int side,
                       const GroupNumbers &s, void *out) {
  const Pairs pairs = Codes::template load<kPair>(step, side);
  const auto put = [&](Vec code, int64_t of) {
    const bool is_used = of < p.used_inputs;
    const int64_t place = p.order != nullptr && is_used ? p.order[of] : of;
    const Vec value = is_used ? multiply_add(code, s.scale, s.minimum) : fill(0.f);
    put_input(p.dtype, out, place - before, side, value);
  };
  put(first_of(pairs), input + 2 * kPair);
  put(second_of(pairs), input + 2 * kPair + 1);
}

// What is added to a code times its scale, for 16 outputs of a group.
template <class Codes>
inline Vec minimum_of(const ost_product &p, int64_t place, Vec scale) {
  if (p.minima != nullptr) return load_scales(p, p.minima, place);
  if (p.zeros == nullptr) return scale * fill(-Codes::kZero);
  return scale * float_of_ints(less(all_of(0), static_cast<const int8_t *>(p.zeros) + place, 1));
}

template <class Codes, int... kPairs>
inline void expand_step(const ost_product &p, const char *step, int64_t input, int64_t before, int side,
                        const GroupNumbers &s, void *out, std::integer_sequence<int, kPairs...>) {
  if (p.order == nullptr && input + kStepInputs <= p.used_inputs)
    return (expand_plain<Codes, kPairs>(p, step, input - before, side, s, out), ...);
  (expand_any<Codes, kPairs>(p, step, input, before, side, s, out), ...);
}

// Writes inputs first .. last - 1 of a tile as weights/tiles.h has them, in the product's format.
template <class Codes>
void expand(const ost_product &p, int64_t tile, int64_t first, int64_t last, void *out) {
  const char *step = codes_of_tile<Codes>(p, tile) + first / kStepInputs * Codes::kStepBytes;
  for (int64_t i = first, end; i < last; i = end) {
    const int64_t group = i / p.group_size, place = (tile * num_groups(p) + group) * kTileOutputs;
    end = std::min((group + 1) * p.group_size, last);
    GroupNumbers numbers[2];
    for (int side = 0; side < 2; ++side) {
      const Vec scale = load_scales(p, p.scales, place + side * 16);
      numbers[side] = {scale, minimum_of<Codes>(p, place + side * 16, scale)};
    }
    for (; i < end; i += kStepInputs, step += Codes::kStepBytes) {
      prefetch_ahead<Codes>(step);
      for (int side = 0; side < 2; ++side)
        expand_step<Codes>(p, step, i, first, side, numbers[side], out,
                           std::make_integer_sequence<int, kStepInputs / 2>{});
    }
  }
}

}  // namespace
}  // namespace ost
