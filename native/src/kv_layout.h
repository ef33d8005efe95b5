// Where does each key and each value of a layer lie?
//
// Attention reads the keys of 16 positions at once: lane i of a vector is the score of position i, so
// that no sum runs across lanes. Hence keys are kept in groups of 16 positions, turned: all 16
// positions of dimension 0, then of dimension 1. Values are read along their dimensions, so they stay
// as they are. Nothing is padded: a layer takes as many bytes as in the plain layout.
//
//   keys, one block of one head       4-byte formats and float16: one row per dimension d
//
//     group 0 (positions 0..15)         d=0 | k0[0]  k1[0]  k2[0] ...  k15[0] |
//     group 1 (positions 16..31)        d=1 | k0[1]  k1[1]  k2[1] ...  k15[1] |
//     ...                               ...
//
//   bfloat16: pairs of dimensions stay together, as VDPBF16PS and AMX's TDPBF16PS want them
//
//                                     d=0,1 | k0[0] k0[1]  k1[0] k1[1] ...  k15[0] k15[1] |  64 bytes
//                                     d=2,3 | k0[2] k0[3]  k1[2] k1[3] ...  k15[2] k15[3] |
//
//   values, one block of one head     4-byte formats and float16: one row per position
//
//                                       v0[0]  v0[1]  v0[2] ...
//                                       v1[0]  v1[1]  v1[2] ...
//
//   bfloat16: pairs of positions stay together, for the same two instructions
//
//                                       v0[0] v1[0]  v0[1] v1[1]  v0[2] v1[2] ...
//                                       v2[0] v3[0]  v2[1] v3[1]  v2[2] v3[2] ...
//
// Whole arrays, innermost last; BS = block size, K = key size, V = value size:
//
//   bfloat16  keys [head][block][BS / 16][K / 2][16][2]    values [head][block][BS / 2][V][2]
//   others    keys [head][block][BS / 16][K][16]           values [head][block][BS][V]
//
// Heads stand outside, since a task reads one head of many blocks. Blocks outside, with heads within,
// were a power of two of bytes from one block to the next, so a head's keys fell on an eighth of the
// sets of a level 2 cache, and values of neighbouring blocks were never neighbours.
#pragma once

#include <cstdint>

#include "ostinato_native.h"

namespace ost {

constexpr int32_t kGroup = 16;  // positions whose keys lie together

// Elements from one block to the next, and from one head of a block to the next.
static inline int64_t key_head_size(const ost_kv &kv) {
  return static_cast<int64_t>(kv.block_size) * kv.key_dim;
}
static inline int64_t value_head_size(const ost_kv &kv) {
  return static_cast<int64_t>(kv.block_size) * kv.value_dim;
}

// The first element of one head's keys or values in one block.
static inline int64_t key_base(const ost_kv &kv, int64_t block, int32_t head) {
  return (head * kv.num_blocks + block) * key_head_size(kv);
}
static inline int64_t value_base(const ost_kv &kv, int64_t block, int32_t head) {
  return (head * kv.num_blocks + block) * value_head_size(kv);
}

// Places of single elements within a head's part of a block; offset is the position in the block.
static inline int64_t key_place(bool pairs, int64_t key_dim, int64_t offset, int64_t d) {
  const int64_t group = offset / kGroup * kGroup * key_dim, lane = offset % kGroup;
  return pairs ? group + (d / 2 * kGroup + lane) * 2 + d % 2 : group + d * kGroup + lane;
}
static inline int64_t value_place(bool pairs, int64_t value_dim, int64_t offset, int64_t d) {
  return pairs ? (offset / 2 * value_dim + d) * 2 + offset % 2 : offset * value_dim + d;
}

}  // namespace ost
