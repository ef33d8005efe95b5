// How do keys and values get into their slots, out of them, and from one to another?
#include <cstring>
#include <vector>

#include "formats.h"
#include "kv_layout.h"

namespace ost {
namespace {

// Calls visit(is_value, place, head, d) for every element of a slot.
template <class Visit>
void for_each_element(const ost_kv &kv, int64_t slot, Visit visit) {
  const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
  const bool pairs = kv.dtype == OST_BFLOAT16;
  for (int32_t head = 0; head < kv.num_kv_heads; ++head) {
    const int64_t keys = key_base(kv, block, head), values = value_base(kv, block, head);
    for (int32_t d = 0; d < kv.key_dim; ++d)
      visit(false, keys + key_place(pairs, kv.key_dim, offset, d), head, d);
    for (int32_t d = 0; d < kv.value_dim; ++d)
      visit(true, values + value_place(pairs, kv.value_dim, offset, d), head, d);
  }
}

template <class Element>
void read_slots(const ost_kv &kv, const int64_t *slots, int64_t num_slots, void *keys,
                void *values) {
  Element *out[2] = {static_cast<Element *>(keys), static_cast<Element *>(values)};
  const Element *in[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, slots[i], [&](bool is_value, int64_t place, int32_t, int32_t) {
      *out[is_value]++ = in[is_value][place];
    });
}

template <class Element>
void copy_slots(const ost_kv &kv, const int64_t *sources, const int64_t *targets,
                int64_t num_slots) {
  std::vector<Element> keys(num_slots * kv.num_kv_heads * kv.key_dim);
  std::vector<Element> values(num_slots * kv.num_kv_heads * kv.value_dim);
  read_slots<Element>(kv, sources, num_slots, keys.data(), values.data());
  const Element *in[2] = {keys.data(), values.data()};
  Element *out[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, targets[i], [&](bool is_value, int64_t place, int32_t, int32_t) {
      out[is_value][place] = *in[is_value]++;
    });
}

template <class Element>
void zero_slots(const ost_kv &kv, const int64_t *slots, int64_t num_slots) {
  Element *out[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, slots[i], [&](bool is_value, int64_t place, int32_t, int32_t) {
      if (out[is_value][place] != 0) out[is_value][place] = 0;
    });
}

}  // namespace
}  // namespace ost

// Elements are moved as bits: 2 or 4 bytes wide.
extern "C" {

void ost_kv_write(const ost_kv *kv, const ost_rows *keys, const ost_rows *values,
                  const int64_t *slots, int64_t num_tokens, int32_t /*num_threads*/) {
  for (int64_t i = 0; i < num_tokens; ++i)
    ost::for_each_element(
        *kv, slots[i], [&](bool is_value, int64_t place, int32_t head, int32_t d) {
          const ost_rows &rows = is_value ? *values : *keys;
          const int64_t from = i * rows.token_stride + head * rows.head_stride + d;
          const float element = ost::load_element(rows.data, rows.dtype, from);
          ost::store_element(is_value ? kv->values : kv->keys, kv->dtype, place, element);
        });
}

void ost_kv_copy(const ost_kv *kv, const int64_t *sources, const int64_t *targets,
                 int64_t num_slots) {
  if (kv->dtype == OST_FLOAT32)
    ost::copy_slots<uint32_t>(*kv, sources, targets, num_slots);
  else
    ost::copy_slots<uint16_t>(*kv, sources, targets, num_slots);
}

void ost_kv_read(const ost_kv *kv, const int64_t *slots, int64_t num_slots, void *keys,
                 void *values) {
  if (kv->dtype == OST_FLOAT32)
    ost::read_slots<uint32_t>(*kv, slots, num_slots, keys, values);
  else
    ost::read_slots<uint16_t>(*kv, slots, num_slots, keys, values);
}

void ost_kv_zero(const ost_kv *kv, const int64_t *slots, int64_t num_slots) {
  if (kv->dtype == OST_FLOAT32)
    ost::zero_slots<uint32_t>(*kv, slots, num_slots);
  else
    ost::zero_slots<uint16_t>(*kv, slots, num_slots);
}
}
