// How the codes of a weight are read, and which inputs are summed up as integers together.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "products/codes_simd.h"
// after it
#include "weights/code_tables.h"
#include "weights/scale_tiles.h"
#include "weights/tiles.h"

namespace ost {
namespace {

constexpr int kStepInputs = 8;
constexpr int64_t kAheadBytes = 2048;

// Formats: eight inputs of a tile are kTileBytes, and the next eight of a side are kStepBytes further. A dot
// multiplies kDotInputs of them, of 16 outputs of a side; see weights/tiles.h for the first two.
struct Bytes {
  using Input = int16_t;
  static constexpr int kRows = kMaxRows;  // that are multiplied at once
  static constexpr int kWholeRows = kRowsOfWholeTiles;
  static constexpr int kJoinedRows = 1;  // that an instruction takes
  static constexpr int kTileBytes = 256, kStepBytes = 256, kDotInputs = 2;
  static int64_t side(const ost_product &, int side) { return side * 32; }  // where one begins
  static constexpr int32_t kZero = 0;  // the code of nothing, where a group has none of its own
  static constexpr int16_t kMore = 128;  // makes it a number without a sign
  static constexpr bool kStreams = true;
  static constexpr bool kAreSmall = false;  // see products/codes_small.h
  template <int kDot>
  static Pairs load(const char *step, int side) {
    return load_bytes(step + kDot * 64 + side * 32);
  }
  static Ints add(Ints sums, Pairs weights, Pairs inputs) {
    return add_products(sums, weights, inputs);
  }
};

struct Nibbles : Bytes {
  static constexpr int kRows = kNibbleRows;
  static constexpr int kTileBytes = 128, kStepBytes = 128;
  static int64_t side(const ost_product &, int side) { return side * 64; }
  static constexpr int32_t kZero = 8;
  static constexpr int16_t kMore = 0;
  template <int kDot>
  static Pairs load(const char *step, int side) {
    return load_nibbles<kDot>(step + side * 64);
  }
};

#if defined(__AVX2__)
#define OST_HALVES
// Nibbles that rows of 8 bits meet: the bytes of two words are inputs 0, 4, 1 and 5 in their low halves,
// and 2, 6, 3 and 7 in their high ones; rows have them in that order.
struct Halves : Nibbles {
  using Input = int8_t;
  static constexpr int kRows = kHalvesRows, kWholeRows = kWholeHalvesRows;
  static constexpr int kDotInputs = 4;
#if defined(OST_SMALL_SUMS)
  static constexpr bool kAreSmall = true;
#endif
  static constexpr int kSmallInputs = kInputsPerStep;  // whose products fit sums of 16 bits
  static constexpr int kOrder[kStepInputs] = {0, 4, 1, 5, 2, 6, 3, 7};
  template <int kDot>
  static Pairs load(const char *step, int side) {
    return load_halves<kDot>(step + side * 64);
  }
#if defined(OST_QUADS)
  static Ints add(Ints sums, Pairs weights, Pairs inputs) {
    return add_quads(sums, weights, inputs);
  }
#endif
};
#endif

// Nibbles that are places in a table. Numbers are their rises, so that what lies beside a nibble stays 0.
template <class Places, class Table>
struct Tabled : Places {
  static constexpr Rises<Table> kRises{};
  static constexpr int32_t kZero = -Table::kNumbers[0];
  static constexpr int kSmallInputs = kInputsPerStep / 2;
  template <int kDot>
  static Pairs load(const char *step, int side) {
    return look_up(kRises.of, Places::template load<kDot>(step, side));
  }
};

// As what codes meet rows of 8 bits, if they do so otherwise than rows of 16.
template <class Codes>
struct HalvesOf {
  using Type = void;
};
#if defined(OST_HALVES)
template <>
struct HalvesOf<Nibbles> {
  using Type = Halves;
};
template <class Table>
struct HalvesOf<Tabled<Nibbles, Table>> {
  static constexpr bool kFits = !Halves::kAreSmall || Rises<Table>().of[15] * 128 * kInputsPerStep / 4 <= 32767;
  using Type = std::conditional_t<kFits, Tabled<Halves, Table>, void>;
};
#endif

#if defined(OST_QUADS)
// Codes that many rows of 8 bits meet are unpacked first: [input / 4][32 outputs][4], bytes without a
// sign.
struct Quads {
  using Input = int8_t;
  static constexpr int kRows = kMaxRows, kWholeRows = kRowsOfWholeTiles, kJoinedRows = 1;
  static constexpr int kTileBytes = 256, kStepBytes = 256, kDotInputs = 4;
  static int64_t side(const ost_product &, int side) { return side * 64; }
  static constexpr bool kStreams = false, kAreSmall = false;
  template <int kDot>
  static Pairs load(const char *step, int side) {
    return load_quads(step + kDot * 128 + side * 64);
  }
  static Ints add(Ints sums, Pairs weights, Pairs inputs) {
    return add_quads(sums, weights, inputs);
  }
};
#endif

// Asks for what comes some steps later: codes stream by once.
template <class Codes>
inline void prefetch_ahead(const char *step) {
  if constexpr (Codes::kStreams) {
#pragma GCC unroll 4
    for (int line = 0; line < Codes::kStepBytes; line += 64)
      __builtin_prefetch(step + kAheadBytes + line, 0, 3);
  }
}

template <class Codes>
inline const char *codes_of_tile(const ost_product &p, int64_t tile) {
  return static_cast<const char *>(p.tiles) +
         tile * (p.num_inputs / kStepInputs) * Codes::kTileBytes;
}

// A span has one scale of a row. Of 16 bits, it is so short that 32 bits hold its sums:
// 32767 * 255 * 256; of 8 bits, the product says how long it is.
constexpr int64_t kSpanInputs = 256;

inline int64_t end_of_span(const ost_product &p, int64_t begin) {
  const int64_t span = p.activation_bits == 0 ? kSpanInputs : p.activation_group;
  return span == 0 ? p.num_inputs : std::min((begin / span + 1) * span, int64_t{p.num_inputs});
}

// A block has one scale of the weight's as well.
inline int64_t end_of_block(const ost_product &p, int64_t begin) {
  return std::min((begin / p.group_size + 1) * p.group_size, end_of_span(p, begin));
}

inline int64_t num_groups(const ost_product &p) {
  return (p.num_inputs + p.group_size - 1) / p.group_size;
}

// A number of each of 16 outputs of a group; see weights/scale_tiles.h for superblocks.
inline Vec load_scales(const ost_product &p, const void *numbers, int64_t place) {
  const int32_t dtype = p.scale_dtype;
  if (dtype == OST_SUPERBLOCKS) {
    const SuperblockPlace at(place, p.group_size);
    const auto *bytes = static_cast<const char *>(numbers);
    const auto *own = reinterpret_cast<const int8_t *>(bytes + at.bytes);
    return float_of_ints(less(all_of(0), own, -1)) *
           load_float16(reinterpret_cast<const uint16_t *>(bytes + at.factors));
  }
  if (dtype == OST_FLOAT32) return load(static_cast<const float *>(numbers) + place);
  const auto *halves = static_cast<const uint16_t *>(numbers) + place;
  return dtype == OST_BFLOAT16 ? load_bfloat16(halves) : load_float16(halves);
}

}  // namespace
}  // namespace ost
