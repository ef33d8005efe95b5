// How does a step's attention become tasks on threads?
//
// A task is an item of the plan and one head of keys; threads take tasks by a counter, and when all
// are done, rows that were cut into partials are merged the same way.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "kv_layout.h"
#include "parallel.h"

namespace ost {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLowest = -1e29f;  // a maximum over nothing

struct State {
  float max = kLowest, sum = 0;  // of base-2 scores
  std::vector<float> weighted;
};

void finish(const ost_attention &a, int32_t row, int32_t head, const State &state) {
  float max = state.max, sum = state.sum, keep = 1;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head] * kLog2E, top = sink > max ? sink : max;
    keep = std::exp2(max - top);
    sum = sum * keep + std::exp2(sink - top);
  }
  const float factor = sum > 0 ? keep / sum : 0;
  const int64_t to = a.tokens[row] * a.output.token_stride + head * a.output.head_stride;
  for (int32_t d = 0; d < a.kv.value_dim; ++d)
    store_element(a.output.data, a.output.dtype, to + d, state.weighted[d] * factor);
}

void see_key(const ost_attention &a, const ost_segment &s, int32_t row, int32_t head, int32_t i,
             State &state) {
  const ost_kv &kv = a.kv;
  const bool pairs = kv.dtype == OST_BFLOAT16;
  const int32_t kv_head = head / (a.num_heads / kv.num_kv_heads), offset = i % kv.block_size;
  const int64_t block = a.blocks[s.first_entry + i / kv.block_size];
  const int64_t keys = key_base(kv, block, kv_head), values = value_base(kv, block, kv_head);
  const int64_t from = a.tokens[row] * a.queries.token_stride + head * a.queries.head_stride;
  float score = 0;
  for (int32_t d = 0; d < kv.key_dim; ++d)
    score += load_element(a.queries.data, a.queries.dtype, from + d) *
             load_element(kv.keys, kv.dtype, keys + key_place(pairs, kv.key_dim, offset, d));
  score *= a.scale;
  if (a.soft_cap > 0) score = a.soft_cap * std::tanh(score / a.soft_cap);
  score *= kLog2E;
  const float max = score > state.max ? score : state.max;
  const float keep = std::exp2(state.max - max), weight = std::exp2(score - max);
  state.max = max;
  state.sum = state.sum * keep + weight;
  for (int32_t d = 0; d < kv.value_dim; ++d)
    state.weighted[d] =
        state.weighted[d] * keep +
        weight * load_element(kv.values, kv.dtype,
                              values + value_place(pairs, kv.value_dim, offset, d));
}

void attend_row(const ost_attention &a, const ost_item &item, int32_t row, int32_t head) {
  State state;
  state.weighted.assign(a.kv.value_dim, 0.0f);
  const int32_t position = a.positions[row];
  for (int32_t n = item.first_segment; n < item.last_segment; ++n) {
    const ost_segment &s = a.segments[n];
    if (row < s.first_row || row >= s.last_row) continue;
    for (int32_t i = 0; i < s.num_keys; ++i) {
      const int32_t at = s.first_position + i;
      if (at > position || (a.window > 0 && at <= position - a.window)) continue;
      see_key(a, s, row, head, i, state);
    }
  }
  if (item.first_partial < 0) {
    finish(a, row, head, state);
    return;
  }
  const int64_t size = a.kv.value_dim + 2, partial = item.first_partial + row - item.first_row;
  float *out = a.partials + (partial * a.num_heads + head) * size;
  for (int32_t d = 0; d < a.kv.value_dim; ++d) out[d] = state.weighted[d];
  out[a.kv.value_dim] = state.max;
  out[a.kv.value_dim + 1] = state.sum;
}

void merge(const ost_attention &a, int32_t index, int32_t head) {
  const int32_t value_dim = a.kv.value_dim;
  State state;
  state.weighted.assign(value_dim, 0.0f);
  for (int32_t i = a.merge_starts[index]; i < a.merge_starts[index + 1]; ++i) {
    const float *in =
        a.partials + (int64_t{a.merge_partials[i]} * a.num_heads + head) * (value_dim + 2);
    const float max = in[value_dim] > state.max ? in[value_dim] : state.max;
    const float keep = std::exp2(state.max - max), weight = std::exp2(in[value_dim] - max);
    state.max = max;
    state.sum = state.sum * keep + in[value_dim + 1] * weight;
    for (int32_t d = 0; d < value_dim; ++d)
      state.weighted[d] = state.weighted[d] * keep + in[d] * weight;
  }
  finish(a, a.merge_rows[index], head, state);
}

struct Work {
  const ost_attention &attention;
  std::atomic<int64_t> next{0};
};

void take_items(void *context) {
  Work &work = *static_cast<Work *>(context);
  const ost_attention &a = work.attention;
  const int32_t group = a.num_heads / a.kv.num_kv_heads;
  const int64_t num_tasks = int64_t{a.num_items} * a.kv.num_kv_heads;
  for (int64_t task; (task = work.next++) < num_tasks;) {
    const ost_item &item = a.items[task / a.kv.num_kv_heads];
    const int32_t first_head = static_cast<int32_t>(task % a.kv.num_kv_heads) * group;
    for (int32_t row = item.first_row; row < item.last_row; ++row)
      for (int32_t head = first_head; head < first_head + group; ++head)
        attend_row(a, item, row, head);
  }
}

void take_merges(void *context) {
  Work &work = *static_cast<Work *>(context);
  const ost_attention &a = work.attention;
  const int64_t num_tasks = int64_t{a.num_merges} * a.num_heads;
  for (int64_t task; (task = work.next++) < num_tasks;)
    merge(a, static_cast<int32_t>(task / a.num_heads), static_cast<int32_t>(task % a.num_heads));
}

}  // namespace
}  // namespace ost

extern "C" void ost_attend(const ost_attention *attention) {
  ost::Work items{*attention}, merges{*attention};
  ost::run_on_threads(ost::take_items, &items, attention->num_threads);
  if (attention->num_merges > 0)
    ost::run_on_threads(ost::take_merges, &merges, attention->num_threads);
}
