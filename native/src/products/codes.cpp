// Products with a weight in 8 or 4 bits, compiled once for each instruction set; OST_CODES is the
// function that hands the kernels out.
//
// A weight is its code, less its group's zero, times its group's scale, plus the group's minimum:
//
//     output = sum over groups of  scale * sum((code - zero) * input) + minimum * sum(input)
//
// Rows become integers first: of 16 bits, relative to the largest of a span of inputs, which is finer
// than bfloat16 is there; or of 8 bits, relative to the largest of a row, where that is asked for.
// Integers are multiplied two by two, or four by four, and sums of a block are exact, whatever their
// order. A row's integers are its own, and its blocks are added in order: its outputs do not depend on
// the rows beside it.
//
// Rows of float32 and float16 as they are, and AMX, multiply with tiles that are expanded to plain
// numbers, see products/product.cpp.
#include "products/codes_blocks.h"
#include "products/codes_small.h"
// after them
#include "products/kernels.h"

namespace ost {

namespace {

#if defined(OST_QUADS)
constexpr int32_t kFewRows = 16;  // up to here it does not pay to unpack a tile first
#endif

// Integers of kRows rows, and their sums with kSides * 16 outputs over a block.
template <class Codes, int kRows, int kSides>
struct Block {
  const typename Codes::Input *rows[kRows];
  Ints sums[kRows][kSides];

  void begin(const ost_product &, const Rows &all, int64_t first_row) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) rows[row] = row_of<typename Codes::Input>(all, first_row + row);
  }

  template <int kDot>
  void add_dot(const char *step, int64_t input) {
    Pairs weights[kSides];
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) weights[side] = Codes::template load<kDot>(step, side);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto *from = rows[row] + input + kDot * Codes::kDotInputs;
      const Pairs inputs = fill_pairs(reinterpret_cast<const int16_t *>(from));
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[row][side] = Codes::add(sums[row][side], weights[side], inputs);
    }
  }

  template <int... kDots>
  void add_step(const char *step, int64_t input, std::integer_sequence<int, kDots...>) {
    (add_dot<kDots>(step, input), ...);
  }

  // Adds inputs first .. last - 1, of which the step is the first; returns the step behind them.
  const char *add(const char *step, int64_t first, int64_t last) {
    for (int64_t input = first; input < last; input += kStepInputs, step += Codes::kStepBytes) {
      prefetch_ahead<Codes>(step);
      add_step(step, input, std::make_integer_sequence<int, kStepInputs / Codes::kDotInputs>{});
    }
    return step;
  }
};

#if defined(OST_BLOCKS)
// Blocks of two outputs and eight inputs, of one side: sums of blocks are registers, which become those of
// rows at the end. Rows of 16 bits are their upper bytes, then their lower ones, which have no sign; sums of
// the upper ones are worth 256 times as much.
template <template <int> class Blocks, int kPlanes, int kRows>
struct Block<Blocks<kPlanes>, kRows, 1> {
  using Codes = Blocks<kPlanes>;
  static constexpr int kGroups = (kRows + kJoinedRows - 1) / kJoinedRows;
  const int8_t *rows[kGroups];
  int64_t plane;  // bytes to the lower ones
  Ints sums[kRows][1];
  BlockSum blocks[kGroups][8];

  void begin(const ost_product &p, const Rows &all, int64_t first_row) {
    plane = p.num_inputs * kJoinedRows;
#pragma GCC unroll 16
    for (int group = 0; group < kGroups; ++group)
      rows[group] = reinterpret_cast<const int8_t *>(all.integers) +
                    (first_row / kJoinedRows + group) * all.stride;
  }

  template <int kPlane>
  void add_step(const char *step, int64_t input) {
    BlockInputs inputs[kGroups];
#pragma GCC unroll 8
    for (int group = 0; group < kGroups; ++group)
      inputs[group] = load_inputs(rows[group] + kPlane * plane + input * kJoinedRows);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const BlockPair pair = Codes::template load_blocks<kPlane>(step, k);
#pragma GCC unroll 8
      for (int group = 0; group < kGroups; ++group) {
        blocks[group][k] = add_block<kPlane>(blocks[group][k], inputs[group], pair.first);
        blocks[group][4 + k] = add_block<kPlane>(blocks[group][4 + k], inputs[group], pair.second);
      }
    }
  }

  template <class Function>
  void each_block(Function function) {
#pragma GCC unroll 8
    for (int group = 0; group < kGroups; ++group)
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) blocks[group][k] = function(blocks[group][k]);
  }

  const char *add(const char *step, int64_t first, int64_t last) {
    const char *end = step + (last - first) / kStepInputs * Codes::kStepBytes;
    each_block([](const BlockSum &) { return no_block_sum(); });
    for (int64_t input = first; input < last; input += kStepInputs) {
      const char *own = step + (input - first) / kStepInputs * Codes::kStepBytes;
      prefetch_ahead<Codes>(own);
      add_step<0>(own, input);
    }
    if constexpr (kPlanes == 2) {
      each_block([](const BlockSum &sum) { return times_256(sum); });
      for (int64_t input = first; input < last; input += kStepInputs, step += Codes::kStepBytes)
        add_step<1>(step, input);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
      sums[row][0] = add_row(sums[row][0], blocks[row / kJoinedRows], row % kJoinedRows);
    return end;
  }
};
#endif

// What becomes of the sums of a block: numbers, which are added to those of the blocks before it in its
// span, and at the end of the span to the totals of the rows.
template <bool kBegins, bool kEnds, class Codes, int kRows, int kSides>
inline void end_block(const ost_product &p, const Block<Codes, kRows, kSides> &block, int64_t place,
                      int first, const float *row_sums, const float *row_scales, int64_t marks,
                      float (*parts)[kSides][16], float (*totals)[kTileOutputs]) {
#pragma GCC unroll 2
  for (int side = 0; side < kSides; ++side) {
    const Vec scale = load_scales(p, p.scales, place + side * 16);
    const bool has_minima = p.minima != nullptr;
    const Vec minimum = has_minima ? load_scales(p, p.minima, place + side * 16) : fill(0.f);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      float *part = parts[row][side], *total = totals[row] + (first + side) * 16;
      const Vec sum = float_of_ints(block.sums[row][side]);
      Vec value = kBegins ? sum * scale : multiply_add(sum, scale, load(part));
      if (has_minima) value = multiply_add(minimum, fill(row_sums[row * marks]), value);
      if (kEnds) store(total, multiply_add(value, fill(row_scales[row * marks]), load(total)));
      else store(part, value);
    }
  }
}

// A group of rows, and kSides * 16 outputs of a tile from the side `first` on.
template <class Codes, int kRows, int kSides>
inline void sum(const ost_product &p, const Rows &rows, int64_t first_row, const Tile &tile,
                int first, float (*totals)[kTileOutputs]) {
  const char *step = tile.codes + Codes::side(p, first);
  const auto *zeros = static_cast<const int8_t *>(p.zeros);
  int64_t place = tile.index * num_groups(p) * kTileOutputs + first * 16;
  int64_t mark = first_row * rows.marks;  // of the first row's block
  const float *scales = rows.scales + mark;
  Block<Codes, kRows, kSides> block;
  alignas(64) float parts[kRows][kSides][16];  // in memory: registers are for the sums
  block.begin(p, rows, first_row);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) store(totals[row] + (first + side) * 16, fill(0.f));
  for (int64_t begin = 0, span_end; begin < p.num_inputs; begin = span_end, ++scales) {
    span_end = end_of_span(p, begin);
    for (int64_t i = begin, end; i < span_end; i = end, ++mark) {
      end = end_of_block(p, i);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const Ints start = all_of(rows.starts[mark + row * rows.marks]);
#pragma GCC unroll 2
        for (int side = 0; side < kSides; ++side) block.sums[row][side] = start;
      }
      if (zeros != nullptr) {
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
          for (int side = 0; side < kSides; ++side)
            block.sums[row][side] = less(block.sums[row][side], zeros + place + side * 16,
                                         rows.sums[mark + row * rows.marks]);
      }
      step = block.add(step, i, end);
      const auto add = [&](auto begins, auto ends) {
        end_block<begins.value, ends.value>(p, block, place, first, rows.float_sums + mark, scales,
                                            rows.marks, parts, totals);
      };
      using Yes = std::true_type;
      using No = std::false_type;
      if (i == begin) end == span_end ? add(Yes{}, Yes{}) : add(Yes{}, No{});
      else end == span_end ? add(No{}, Yes{}) : add(No{}, No{});
      if (end % p.group_size == 0) place += kTileOutputs;
    }
  }
}

// Rows of integers, as many as rows have parts.
void put_rows(const ost_product &p, int64_t first, int count, int parts, int64_t tile,
              const float (*totals)[kTileOutputs]) {
  const auto put_one = p.dtype == OST_FLOAT32    ? put<Float32Numbers>
                       : p.dtype == OST_BFLOAT16 ? put<BFloat16Numbers>
                                                 : put<Float16Numbers>;
  for (int row = 0; row < count; row += parts) {
    for (int side = 0; side < 2; ++side) {
      Vec total = load(totals[row] + side * 16);
      if (parts > 1) total = total + load(totals[row + 1] + side * 16);
      put_one(p, (first + row) / parts, tile * kTileOutputs + side * 16, total);
    }
  }
}

template <class Codes, int kRows>
void multiply_group(const ost_product &p, const Rows &rows, int64_t first_row, const Tile &tile) {
  constexpr int kSides = kRows <= Codes::kWholeRows ? 2 : 1;
  alignas(64) float totals[kRows][kTileOutputs];
  for (int first = 0; first < 2; first += kSides) {
#if defined(OST_SMALL_SUMS)
    if constexpr (Codes::kAreSmall) sum_small<Codes, kRows, kSides>(p, rows, first_row, tile, first, totals);
    else
#endif
      sum<Codes, kRows, kSides>(p, rows, first_row, tile, first, totals);
  }
  put_rows(p, first_row, kRows, rows.parts, tile.index, totals);
}

using Group = void (*)(const ost_product &, const Rows &, int64_t, const Tile &);

template <class Codes, int... kRows>
constexpr Group group_of(int num_rows, std::integer_sequence<int, kRows...>) {
  constexpr Group groups[] = {multiply_group<Codes, kRows + 1>...};
  return groups[num_rows - 1];
}

// Rows are cut evenly into groups of at most Codes::kRows rows of integers, between parts of a row or rows
// that are joined never.
template <class Codes>
void multiply_tile(const ost_product &p, const Rows &rows, const Tile &tile) {
  const int64_t num_rows = int64_t{p.num_rows} * rows.parts, unit = std::max(rows.parts, Codes::kJoinedRows);
  const int64_t num_units = (num_rows + unit - 1) / unit, group_size = Codes::kRows / unit;
  const int64_t num_groups = (num_units + group_size - 1) / group_size;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t begin = num_units * group / num_groups * unit;
    const int64_t end = std::min(num_rows, num_units * (group + 1) / num_groups * unit);
    group_of<Codes>(static_cast<int>(end - begin),
                    std::make_integer_sequence<int, Codes::kRows>{})(p, rows, begin, tile);
  }
}

#if defined(OST_QUADS)
// Many rows of 8 bits: each tile is unpacked once, into the cache.
template <class Codes>
void multiply_quads(const ost_product &p, int64_t first, int64_t last, int32_t more) {
  const Rows rows = integers_of<int8_t>(p, more + Codes::kMore);
  const int64_t num_steps = p.num_inputs / kStepInputs;
  auto *memory = static_cast<char *>(tile_scratch(num_steps * Quads::kStepBytes));
  for (int64_t tile = first; tile < last; ++tile) {
    const char *codes = codes_of_tile<Codes>(p, tile);
    for (int64_t step = 0; step < num_steps; ++step, codes += Codes::kStepBytes) {
      prefetch_ahead<Codes>(codes);
      unpack_quads<Codes>(codes, memory + step * Quads::kStepBytes);
    }
    multiply_tile<Quads>(p, rows, {memory, tile});
  }
}
#endif

template <class Codes>
void multiply(const ost_product &p, int64_t first, int64_t last) {
  const int32_t more = p.zeros == nullptr && p.minima == nullptr ? Codes::kZero : 0;
#if defined(OST_QUADS)
  if (p.num_rows > kFewRows && p.activation_bits == 8)
    return multiply_quads<Codes>(p, first, last, more);
#endif
#if defined(OST_HALVES)
  using Small = typename HalvesOf<Codes>::Type;
  if constexpr (!std::is_void_v<Small>) {
    if (p.activation_group == kInputsPerStep && p.group_size % kInputsPerStep == 0) {
      const Rows rows = integers_of<int8_t>(p, more, Small::kOrder);
      for (int64_t tile = first; tile < last; ++tile)
        multiply_tile<Small>(p, rows, {codes_of_tile<Codes>(p, tile), tile});
      return;
    }
  }
#endif
  const Rows rows = integers_of<int16_t>(p, more);
  for (int64_t tile = first; tile < last; ++tile)
    multiply_tile<Codes>(p, rows, {codes_of_tile<Codes>(p, tile), tile});
}

#if defined(OST_BLOCKS)
template <class Codes>
void multiply_planes(const ost_product &p, int64_t first, int64_t last) {
  const Rows rows = rows_in_blocks<Codes>(p);
  for (int64_t tile = first; tile < last; ++tile)
    multiply_tile<Codes>(p, rows, {codes_of_tile<Codes>(p, tile), tile});
}

template <template <int> class Blocks>
void multiply_blocks(const ost_product &p, int64_t first, int64_t last) {
  (p.activation_bits == 8 ? multiply_planes<Blocks<1>> : multiply_planes<Blocks<2>>)(p, first, last);
}
#endif

template <class Codes>
constexpr CodeKernels kernels_of() {
  return {multiply<Codes>, expand<Codes>};
}

}  // namespace

CodeKernels OST_CODES(int32_t weight_format) {
#if defined(OST_BLOCKS)
  if (weight_format == OST_INT8_BLOCKS) return {multiply_blocks<ByteBlocks>, nullptr};
  if (weight_format == OST_INT4_BLOCKS) return {multiply_blocks<NibbleBlocks>, nullptr};
  if (weight_format == OST_MXFP4_BLOCKS) return {multiply_blocks<Mxfp4Blocks>, nullptr};
  if (weight_format == OST_IQ4_BLOCKS) return {multiply_blocks<Iq4Blocks>, nullptr};
#endif
  if (weight_format == OST_MXFP4) return kernels_of<Tabled<Nibbles, Mxfp4>>();
  if (weight_format == OST_IQ4) return kernels_of<Tabled<Nibbles, Iq4>>();
  return weight_format == OST_INT8 ? kernels_of<Bytes>() : kernels_of<Nibbles>();
}

}  // namespace ost
