// The layout of the keys and values of a layer.
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
//   int8: as bfloat16, a byte each, and in front of each group of 16 positions their 16 scales
//
//                                       s0  s1  s2 ...  s15                               |  64 bytes
//                                     d=0,1 | k0[0] k0[1]  k1[0] k1[1] ...  k15[0] k15[1] |  32 bytes
//
// Whole arrays, innermost last; BS = block size, K = key size, V = value size:
//
//   bfloat16  keys [head][block][BS / 16][K / 2][16][2]    values [head][block][BS / 16][8][V][2]
//   int8      keys [head][block][BS / 16] of 16 scales,    values [head][block][BS / 16] of 16 scales,
//             then [K / 2][16][2]                          then [8][V][2]
//   others    keys [head][block][BS / 16][K][16]           values [head][block][BS / 16][16][V]
//
// Heads stand outside, since a task reads one head of many blocks. Blocks outside, with heads within,
// were a power of two of bytes from one block to the next, so a head's keys fell on an eighth of the
// sets of a level 2 cache, and values of neighbouring blocks were never neighbours.
#pragma once

#include <cstdint>

#include "ostinato_native.h"

namespace ost {

constexpr int32_t kGroup = 16;  // positions whose keys are kept together
constexpr int64_t kScaleBytes = sizeof(float);

static inline bool has_scales(const ost_kv &kv) { return kv.dtype == OST_KV_INT8; }
static inline bool has_pairs(const ost_kv &kv) {
  return kv.dtype == OST_BFLOAT16 || kv.dtype == OST_KV_INT8;
}
// Elements that the scales of a group take.
static inline int64_t scales_size(const ost_kv &kv) {
  return has_scales(kv) ? kGroup * kScaleBytes : 0;
}

// Elements from one group of a head to the next.
static inline int64_t key_group_size(const ost_kv &kv) {
  return scales_size(kv) + int64_t{kGroup} * kv.key_dim;
}
static inline int64_t value_group_size(const ost_kv &kv) {
  return scales_size(kv) + int64_t{kGroup} * kv.value_dim;
}

// The first element, behind the scales, of the group of a position in a block of a head.
static inline int64_t group_number(const ost_kv &kv, int64_t block, int32_t head, int64_t offset) {
  return ((head * kv.num_blocks + block) * kv.block_size + offset) / kGroup;
}
static inline int64_t key_group(const ost_kv &kv, int64_t block, int32_t head, int64_t offset) {
  return group_number(kv, block, head, offset) * key_group_size(kv) + scales_size(kv);
}
static inline int64_t value_group(const ost_kv &kv, int64_t block, int32_t head, int64_t offset) {
  return group_number(kv, block, head, offset) * value_group_size(kv) + scales_size(kv);
}

// Places of single elements within a group; lane is the position in it.
static inline int64_t key_place(bool pairs, int64_t lane, int64_t d) {
  return pairs ? (d / 2 * kGroup + lane) * 2 + d % 2 : d * kGroup + lane;
}
static inline int64_t value_place(bool pairs, int64_t value_dim, int64_t lane, int64_t d) {
  return pairs ? (lane / 2 * value_dim + d) * 2 + lane % 2 : lane * value_dim + d;
}

// The scales of a group of codes.
static inline const float *scales_of(const int8_t *group) {
  return reinterpret_cast<const float *>(group) - kGroup;
}
static inline float *scales_of(int8_t *group) { return reinterpret_cast<float *>(group) - kGroup; }

}  // namespace ost
