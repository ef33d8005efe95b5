// Transposes new keys and values into the layout of kv/layout.h.
//
// 16 tokens that fill a group are turned in registers, 32 bits at a time (codes 16). Single tokens are
// stored element by element: neighbours in a pair may be another thread's.
//
// Included after one simd/*.h.
#pragma once

#include "attention/kernels.h"
#include "kv/codes.h"
#include "kv/layout.h"
#include "threads/scratch.h"

namespace ost {
namespace {

// Elements of one token's head, as bits in the stored format; converted into room where they are not.
// The scale is that of codes.
template <class Element>
inline const Element *in_format(const ost_kv &kv, const ost_rows &rows, int64_t token, int32_t head,
                                int32_t size, Element *room, float *scale) {
  const int64_t from = token * rows.token_stride + head * rows.head_stride;
  if constexpr (sizeof(Element) == 1) {
    *scale = store_codes(rows.data, rows.dtype, from, size, room);
    return room;
  }
  if (rows.dtype == kv.dtype) return static_cast<const Element *>(rows.data) + from;
  for (int32_t d = 0; d < size; ++d)
    store_element(room, kv.dtype, d, load_element(rows.data, rows.dtype, from + d));
  return room;
}

// words[j][16] = tokens[16][j] for num_words words of 32 bits: pairs of bfloat16, or floats.
inline void turn_rows(const uint32_t *const *tokens, int32_t num_words, uint32_t *words) {
  const uint32_t *at[16];
  int32_t j = 0;
  for (; j + 16 <= num_words; j += 16) {
    for (int i = 0; i < 16; ++i) at[i] = tokens[i] + j;
    turn_words(at, words + j * 16);
  }
  for (; j < num_words; ++j)
    for (int i = 0; i < 16; ++i) words[j * 16 + i] = tokens[i][j];
}

template <class Element>
inline void write_keys(const ost_kv &kv, const Element *const *tokens, Element *keys) {
  if constexpr (sizeof(Element) == 1) {
    for (int32_t d = 0; d < kv.key_dim; d += 2)
      for (int i = 0; i < 16; ++i) std::memcpy(keys + (d * 8 + i) * 2, tokens[i] + d, 2);
  } else if constexpr (sizeof(Element) == 4) {
    turn_rows(tokens, kv.key_dim, keys);
  } else if (kv.dtype == OST_BFLOAT16) {
    const uint32_t *at[16];
    for (int i = 0; i < 16; ++i) at[i] = reinterpret_cast<const uint32_t *>(tokens[i]);
    turn_rows(at, kv.key_dim / 2, reinterpret_cast<uint32_t *>(keys));
  } else {
    for (int32_t d = 0; d < kv.key_dim; ++d)
      for (int i = 0; i < 16; ++i) keys[d * 16 + i] = tokens[i][d];
  }
}

template <class Element>
inline void write_values(const ost_kv &kv, const Element *const *tokens, Element *values) {
  const int64_t size = kv.value_dim;
  if (!has_pairs(kv)) {
    for (int i = 0; i < 16; ++i) std::memcpy(values + i * size, tokens[i], size * sizeof(Element));
    return;
  }
  for (int i = 0; i < 16; i += 2) {
    const Element *even = tokens[i], *odd = tokens[i + 1];
    Element *to = values + i * size;
    for (int64_t d = 0; d < size; ++d) {
      to[2 * d] = even[d];
      to[2 * d + 1] = odd[d];
    }
  }
}

// Tokens that begin at a group's first slot and fill it.
inline bool fills_group(const int64_t *slots, int64_t left) {
  if (left < kGroup || slots[0] % kGroup != 0) return false;
  for (int i = 1; i < kGroup; ++i)
    if (slots[i] != slots[0] + i) return false;
  return true;
}

template <class Element>
struct Writer {
  const ost_kv &kv;
  const ost_rows &key_rows, &value_rows;
  int32_t head;
  Element *room;  // 16 rows of the larger size

  const Element *row(const ost_rows &rows, int64_t token, int32_t size, int64_t place,
                     Element *group, int64_t lane) const {
    float *scale = nullptr;
    if constexpr (sizeof(Element) == 1) scale = scales_of(group) + lane;
    return in_format(kv, rows, token, head, size, room + place * size, scale);
  }
  Element *key_group_of(int64_t slot) const {
    return static_cast<Element *>(kv.keys) +
           key_group(kv, slot / kv.block_size, head, slot % kv.block_size);
  }
  Element *value_group_of(int64_t slot) const {
    return static_cast<Element *>(kv.values) +
           value_group(kv, slot / kv.block_size, head, slot % kv.block_size);
  }

  void write_group(int64_t token, int64_t slot) const {
    Element *keys = key_group_of(slot), *values = value_group_of(slot);
    const Element *tokens[16];
    for (int i = 0; i < 16; ++i) tokens[i] = row(key_rows, token + i, kv.key_dim, i, keys, i);
    write_keys(kv, tokens, keys);
    for (int i = 0; i < 16; ++i) tokens[i] = row(value_rows, token + i, kv.value_dim, i, values, i);
    write_values(kv, tokens, values);
  }

  // Prefetches the cache lines of a slot that is written soon: stores wait for theirs one after the
  // other, and a slot's keys are in as many lines as two keys have elements.
  void prefetch(int64_t slot) const {
    const Element *keys = key_group_of(slot), *values = value_group_of(slot);
    prefetch_lines(keys - scales_size(kv), key_group_size(kv));
    if (has_scales(kv)) prefetch_lines(values - scales_size(kv), scales_size(kv));
    prefetch_lines(values + slot % kGroup / 2 * 2 * kv.value_dim, 2 * kv.value_dim);
  }

  static void prefetch_lines(const Element *from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(Element)) __builtin_prefetch(from + i, 1);
  }

  void write_token(int64_t token, int64_t slot) const {
    const int64_t lane = slot % kGroup;  // blocks are whole groups
    const bool pairs = has_pairs(kv);
    Element *keys = key_group_of(slot), *values = value_group_of(slot);
    const Element *key = row(key_rows, token, kv.key_dim, 0, keys, lane);
    for (int32_t d = 0; d < kv.key_dim; ++d) keys[key_place(pairs, lane, d)] = key[d];
    const Element *value = row(value_rows, token, kv.value_dim, 0, values, lane);
    for (int32_t d = 0; d < kv.value_dim; ++d)
      values[value_place(pairs, kv.value_dim, lane, d)] = value[d];
  }
};

template <class Element>
void write_tokens(const ost_kv &kv, const ost_rows &keys, const ost_rows &values,
                  const int64_t *slots, int64_t first, int64_t last, int32_t head) {
  const int64_t size = kv.key_dim > kv.value_dim ? kv.key_dim : kv.value_dim;
  const Writer<Element> writer{
      kv, keys, values, head,
      static_cast<Element *>(thread_scratch(kGroup * size * sizeof(Element)))};
  if (first < last && !fills_group(slots + first, last - first)) writer.prefetch(slots[first]);
  for (int64_t token = first; token < last;) {
    if (fills_group(slots + token, last - token)) {
      writer.write_group(token, slots[token]);
      token += kGroup;
    } else {
      if (token + 1 < last) writer.prefetch(slots[token + 1]);
      writer.write_token(token, slots[token]);
      ++token;
    }
  }
}

inline void write(const ost_kv &kv, const ost_rows &keys, const ost_rows &values, const int64_t *slots,
           int64_t first, int64_t last, int32_t head) {
  if (kv.dtype == OST_FLOAT32)
    write_tokens<uint32_t>(kv, keys, values, slots, first, last, head);
  else if (kv.dtype == OST_KV_INT8)
    write_tokens<int8_t>(kv, keys, values, slots, first, last, head);
  else
    write_tokens<uint16_t>(kv, keys, values, slots, first, last, head);
}

}  // namespace
}  // namespace ost
