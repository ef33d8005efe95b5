// Writes keys and values into slots, reads them, and copies them between slots.
#include <atomic>
#include <cstring>
#include <vector>

#include "simd/formats.h"
#include "attention/kernels.h"
#include "kv/layout.h"
#include "threads/parallel.h"

namespace ost {
namespace {

// Calls visit(is_value, place) for every element of a slot; behind codes, for the bytes of their scale.
template <class Visit>
void for_each_element(const ost_kv &kv, int64_t slot, Visit visit) {
  const int64_t block = slot / kv.block_size, offset = slot % kv.block_size, lane = offset % kGroup;
  const bool pairs = has_pairs(kv);
  const auto visit_scale = [&](bool is_value, int64_t group) {
    if (!has_scales(kv)) return;
    const int64_t scale = group - scales_size(kv) + lane * kScaleBytes;
    for (int64_t byte = 0; byte < kScaleBytes; ++byte) visit(is_value, scale + byte);
  };
  for (int32_t head = 0; head < kv.num_kv_heads; ++head) {
    const int64_t keys = key_group(kv, block, head, offset);
    const int64_t values = value_group(kv, block, head, offset);
    for (int32_t d = 0; d < kv.key_dim; ++d) visit(false, keys + key_place(pairs, lane, d));
    visit_scale(false, keys);
    for (int32_t d = 0; d < kv.value_dim; ++d)
      visit(true, values + value_place(pairs, kv.value_dim, lane, d));
    visit_scale(true, values);
  }
}

template <class Element>
void read_slots(const ost_kv &kv, const int64_t *slots, int64_t num_slots, void *keys,
                void *values) {
  Element *out[2] = {static_cast<Element *>(keys), static_cast<Element *>(values)};
  const Element *in[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, slots[i], [&](bool is_value, int64_t place) {
      *out[is_value]++ = in[is_value][place];
    });
}

template <class Element>
void copy_slots(const ost_kv &kv, const int64_t *sources, const int64_t *targets,
                int64_t num_slots) {
  std::vector<Element> keys(num_slots * kv.num_kv_heads * key_group_size(kv) / kGroup);
  std::vector<Element> values(num_slots * kv.num_kv_heads * value_group_size(kv) / kGroup);
  read_slots<Element>(kv, sources, num_slots, keys.data(), values.data());
  const Element *in[2] = {keys.data(), values.data()};
  Element *out[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, targets[i], [&](bool is_value, int64_t place) {
      out[is_value][place] = *in[is_value]++;
    });
}

template <class Element>
void zero_slots(const ost_kv &kv, const int64_t *slots, int64_t num_slots) {
  Element *out[2] = {static_cast<Element *>(kv.keys), static_cast<Element *>(kv.values)};
  for (int64_t i = 0; i < num_slots; ++i)
    for_each_element(kv, slots[i], [&](bool is_value, int64_t place) {
      if (out[is_value][place] != 0) out[is_value][place] = 0;
    });
}

// Many tokens are cut into tasks by heads and by runs of tokens, few by nothing at all.
struct Writes {
  const ost_kv &kv;
  const ost_rows &keys, &values;
  const int64_t *slots;
  int64_t num_tokens;
  const Kernels &kernels;
  std::atomic<int64_t> next{0};

  static constexpr int64_t kRun = 256;  // tokens
  int64_t tasks_per_head() const { return (num_tokens + kRun - 1) / kRun; }
};

void take_writes(void *context) {
  Writes &w = *static_cast<Writes *>(context);
  const int64_t runs = w.tasks_per_head(), tasks = runs * w.kv.num_kv_heads;
  for (int64_t task; (task = w.next++) < tasks;) {
    const int64_t first = task % runs * Writes::kRun, last = first + Writes::kRun;
    w.kernels.write(w.kv, w.keys, w.values, w.slots, first,
                    last < w.num_tokens ? last : w.num_tokens, static_cast<int32_t>(task / runs));
  }
}

}  // namespace
}  // namespace ost

// Elements are moved as bits, by a function for each width.
#define OST_OF_WIDTH(function, ...)                   \
  switch (ost::bytes_of(kv->dtype)) {                 \
    case 4:                                           \
      return ost::function<uint32_t>(*kv, __VA_ARGS__); \
    case 2:                                           \
      return ost::function<uint16_t>(*kv, __VA_ARGS__); \
    default:                                          \
      return ost::function<uint8_t>(*kv, __VA_ARGS__); \
  }

extern "C" {

void ost_kv_write(const ost_kv *kv, const ost_rows *keys, const ost_rows *values,
                  const int64_t *slots, int64_t num_tokens, int32_t num_threads) {
  ost::Writes writes{*kv, *keys, *values, slots, num_tokens, ost::kernels()};
  const int64_t tasks = writes.tasks_per_head() * kv->num_kv_heads;
  ost::run_on_threads(ost::take_writes, &writes,
                      tasks < num_threads ? static_cast<int32_t>(tasks) : num_threads);
}

void ost_kv_copy(const ost_kv *kv, const int64_t *sources, const int64_t *targets,
                 int64_t num_slots) {
  OST_OF_WIDTH(copy_slots, sources, targets, num_slots)
}

void ost_kv_read(const ost_kv *kv, const int64_t *slots, int64_t num_slots, void *keys,
                 void *values) {
  OST_OF_WIDTH(read_slots, slots, num_slots, keys, values)
}

void ost_kv_zero(const ost_kv *kv, const int64_t *slots, int64_t num_slots) {
  OST_OF_WIDTH(zero_slots, slots, num_slots)
}
}
