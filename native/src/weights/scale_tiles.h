// Where the scales, or the minima, of a tile's groups are.
//
// Of a plain format they stand by group, 32 outputs side by side. Blocks of a GGUF file that have 256
// inputs keep them smaller, and so do we: what a group has is a byte times the factor of its superblock.
//
//     plain         [num_outputs / 32][group][32]
//     superblocks   [num_outputs / 32][num_inputs / 256]  float16 factors [32], bytes [256 / group_size][32]
#pragma once

#include <cstdint>

#include "simd/formats.h"
#include "ostinato_ops.h"
#include "weights/tiles.h"

namespace ost {

constexpr int64_t kSuperInputs = 256;
constexpr int64_t kMinGroup = 16;  // inputs
constexpr int64_t kFactorBytes = 2 * kTileOutputs;

// Of an output of a group, by its place among those of a plain format: where its factor and its byte are.
struct SuperblockPlace {
  SuperblockPlace(int64_t place, int64_t group_size) {
    const int shift = group_size == kMinGroup ? 9 : 8;  // of groups of 32 else: a division takes longer
    const int64_t size = int64_t{1} << shift, begin = (place >> shift) * (kFactorBytes + size);
    factors = begin + place % kTileOutputs * 2;
    bytes = begin + kFactorBytes + (place & (size - 1));
  }
  int64_t factors, bytes;
};

// Bytes of a tile's scales.
inline int64_t bytes_of_scales(int32_t dtype, int64_t num_groups, int64_t group_size) {
  const int64_t size = num_groups * kTileOutputs;
  if (dtype != OST_SUPERBLOCKS) return size * bytes_of(dtype);
  return size + num_groups * group_size / kSuperInputs * kFactorBytes;
}

}  // namespace ost
