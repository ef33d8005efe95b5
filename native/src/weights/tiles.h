// The layouts of a packed weight. It is packed once, when it is loaded, and every instruction set can
// multiply with it.
//
// A tile holds 32 outputs and all inputs; tiles follow each other. Within a tile inputs follow each
// other, and an input has its 32 outputs side by side. In bfloat16 two inputs stand together, since
// VDPBF16PS and TDPBF16PS multiply pairs; everything else takes pairs apart by a shift and a mask:
//
//     bfloat16       [num_outputs / 32][num_inputs / 2][32][2]
//     float16, 32    [num_outputs / 32][num_inputs][32]
//
//     tile of bfloat16                        (o7i2: output 7, input 2)
//     64 bytes   o0i0 o0i1   o1i0 o1i1   ...  o15i0 o15i1
//     64 bytes   o16i0 o16i1 o17i0 o17i1 ...  o31i0 o31i1
//     64 bytes   o0i2 o0i3   o1i2 o1i3   ...
//
// TDPBF16PS reads 16 such pairs of inputs, 32 lines, as two tiles of 16 lines at every other line.
// Both sizes are rounded up to multiples of 32; what is added is zero.
//
// Codes of fewer bits stand in pairs as well; of 4 bits, a word holds an input of each of four pairs:
//
//     8 bits   [num_outputs / 32][num_inputs / 2][32][2]
//     4 bits   [num_outputs / 32][num_inputs / 8][32][2], inputs j, 2 + j, 4 + j, 6 + j in word j
//
// ARM's instructions for bytes take two outputs of eight inputs at a time. For processors that have them,
// codes stand in such blocks of 16 bytes, and 16 outputs are by themselves; of 4 bits, a block's bytes have
// those of its four outputs further in their high halves:
//
//     8 bits   [num_outputs / 16][num_inputs / 8][8][2][8]
//     4 bits   [num_outputs / 16][num_inputs / 8][4][2][8], blocks b and 4 + b in bytes of b
#pragma once

#include <cstdint>

#include "ostinato_ops.h"

namespace ost {

constexpr int kTileOutputs = 32;
constexpr int kInputsPerStep = 32;  // what num_inputs is a multiple of

constexpr int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

constexpr int64_t num_tiles(int64_t num_outputs) {
  return round_up(num_outputs, kTileOutputs) / kTileOutputs;
}

// Inputs that stand together.
constexpr int inputs_per_pack(int32_t dtype) { return dtype == OST_BFLOAT16 ? 2 : 1; }

constexpr bool in_blocks(int32_t weight_format) {
  return weight_format == OST_INT8_BLOCKS || weight_format == OST_INT4_BLOCKS || weight_format >= OST_MXFP4_BLOCKS;
}

// Whether codes are places in a table.
constexpr bool has_table(int32_t weight_format) { return weight_format >= OST_MXFP4; }

// Of a weight of codes.
constexpr int64_t bits_of_codes(int32_t weight_format) {
  return weight_format == OST_INT8 || weight_format == OST_INT8_BLOCKS ? 8 : 4;
}

// Where a number is among the tiles; num_inputs is rounded up.
constexpr int64_t place_in_tiles(int32_t dtype, int64_t num_inputs, int64_t output, int64_t input) {
  const int64_t pack = inputs_per_pack(dtype);
  return output / kTileOutputs * kTileOutputs * num_inputs +
         (input / pack * kTileOutputs + output % kTileOutputs) * pack + input % pack;
}

}  // namespace ost
