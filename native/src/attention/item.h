// Computes one item of the plan for one KV head.
//
// Its rows walk through its segments chunk by chunk, all of them over a chunk before the next one is
// read: a shared run is read once, and what a row has gathered flows on into its own tail. Where a
// section ends, what rows have gathered is added to the sections before, or left as a partial, and
// they begin anew:
//
//   keys       |----- section 0 -----|----- section 1 -----|--- 2 --
//   segments   ───────── s y s t e m ─────┬── d o c ──┬── A's tail ─
//   sums       s0                    s1                    s2          (s0 + s1) + s2
//
// However segments are cut and parts are shared out, a row so adds the same numbers in the same order.
//
// Included after attention/tile.h.
#pragma once

#include "threads/scratch.h"

namespace ost {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// What a task holds of its rows; places within its thread's scratch.
template <class Math>
struct TaskScratch {
  typename Math::Operand *queries;  // (rows, key_dim)
  float *weighted, *max, *sums;     // (rows, value_stride), (rows,), (rows, 16)
  float *earlier, *earlier_max, *earlier_sums;  // of sections before: (rows, value_stride), (rows,) twice
  int32_t *first, *last;            // (rows,)
  float *steps;                     // (rows,): what whole numbers of queries are worth
  typename Math::Stored *ragged;    // values of a group that is not full, (16, value_dim)
  typename Math::Stored *joined;    // values of a chunk side by side, where tiles want them so

  TaskScratch(const Setting &setting, int32_t num_rows) {
    const int64_t rows = num_rows + 32;  // tiles read behind the last one
    const int64_t query_bytes = rows * setting.key_dim * sizeof(typename Math::Operand);
    const int64_t weighted_bytes = rows * setting.value_stride * sizeof(float);
    const int64_t group_bytes = kGroup * setting.value_dim * sizeof(typename Math::Stored) +
                                (kHasCodes<Math> ? kGroup * kScaleBytes : 0);
    const int64_t row_bytes = rows * 4;
    char *p = static_cast<char *>(thread_scratch(query_bytes + 2 * weighted_bytes + 22 * row_bytes +
                                                 (kChunkGroups + 1) * group_bytes + 12 * 64));
    const auto place = [&p](int64_t bytes) {
      char *at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    queries = reinterpret_cast<typename Math::Operand *>(place(query_bytes));
    weighted = reinterpret_cast<float *>(place(weighted_bytes));
    max = reinterpret_cast<float *>(place(row_bytes));
    sums = reinterpret_cast<float *>(place(16 * row_bytes));
    earlier = reinterpret_cast<float *>(place(weighted_bytes));
    earlier_max = reinterpret_cast<float *>(place(row_bytes));
    earlier_sums = reinterpret_cast<float *>(place(row_bytes));
    first = reinterpret_cast<int32_t *>(place(row_bytes));
    last = reinterpret_cast<int32_t *>(place(row_bytes));
    steps = reinterpret_cast<float *>(place(row_bytes));
    ragged = reinterpret_cast<typename Math::Stored *>(place(group_bytes));
    joined = reinterpret_cast<typename Math::Stored *>(place(kChunkGroups * group_bytes));
    std::memset(weighted, 0, int64_t{num_rows} * setting.value_stride * sizeof(float));
    std::memset(sums, 0, int64_t{num_rows} * 16 * sizeof(float));
    for (int32_t i = 0; i < num_rows; ++i) max[i] = earlier_max[i] = kLowest;
  }
};

// What a row has gathered, scaled to its maximum.
struct RowAccumulator {
  float *weighted, *max, *sum;
};

// Adds what a row has gathered in one section more. Scaling by powers of two rounds nothing, so what
// is rounded are the sums alone.
inline void add_section(const RowAccumulator &to, const float *weighted, float max, float sum,
                        int32_t value_dim) {
  if (max == kLowest) return;  // nothing of it is seen
  if (*to.max == kLowest) {
    std::memcpy(to.weighted, weighted, value_dim * sizeof(float));
    *to.max = max;
    *to.sum = sum;
    return;
  }
  const float top = max > *to.max ? max : *to.max;
  const float keep = power_of_whole(*to.max - top), take = power_of_whole(max - top);
  *to.max = top;
  *to.sum = *to.sum * keep + sum * take;
  const Vec keeps = fill(keep), takes = fill(take);
  int32_t d = 0;
  for (; d + 16 <= value_dim; d += 16)
    store(to.weighted + d, load(to.weighted + d) * keeps + load(weighted + d) * takes);
  for (; d < value_dim; ++d) to.weighted[d] = to.weighted[d] * keep + weighted[d] * take;
}

// Each returns what one of the query's numbers is worth.
inline float load_query(const void *data, int32_t dtype, int64_t from, int32_t size, float *to) {
  int32_t d = 0;
  for (; d + 16 <= size; d += 16) store(to + d, load_floats(data, dtype, from + d, 16));
  for (; d < size; ++d) to[d] = load_element(data, dtype, from + d);
  return 1;
}
inline float load_query(const void *data, int32_t dtype, int64_t from, int32_t size, int16_t *to) {
  return store_whole(data, dtype, from, size, to);
}
// Only bfloat16 queries are taken as they are.
inline float load_query(const void *data, int32_t, int64_t from, int32_t size, uint16_t *to) {
  std::memcpy(to, static_cast<const uint16_t *>(data) + from, size * sizeof(uint16_t));
  return 1;
}
// Prefetches the cache lines of a row's query, and of its output, which is written at the end.
inline void prefetch_row(const ost_attention &a, int32_t row, int64_t head) {
  const int64_t token = a.tokens[row];
  const int64_t key_bytes = bytes_of(a.queries.dtype), value_bytes = bytes_of(a.output.dtype);
  const char *query = static_cast<const char *>(a.queries.data) +
                      (token * a.queries.token_stride + head * a.queries.head_stride) * key_bytes;
  const char *output = static_cast<const char *>(a.output.data) +
                       (token * a.output.token_stride + head * a.output.head_stride) * value_bytes;
  for (int64_t i = 0; i < a.kv.key_dim * key_bytes; i += 64) __builtin_prefetch(query + i);
  for (int64_t i = 0; i < a.kv.value_dim * value_bytes; i += 64) __builtin_prefetch(output + i, 1, 2);
}

inline void store_output(const ost_rows &output, int64_t to, const float *weighted, int32_t size,
                         float factor) {
  const Vec by = fill(factor);
  int32_t d = 0;
  for (; d + 16 <= size; d += 16) {
    const Vec x = load(weighted + d) * by;
    uint16_t *halves = static_cast<uint16_t *>(output.data) + to + d;
    if (output.dtype == OST_FLOAT32)
      store(static_cast<float *>(output.data) + to + d, x);
    else if (output.dtype == OST_BFLOAT16)
      store_bfloat16(halves, x);
    else
      store_float16(halves, x);
  }
  for (; d < size; ++d) store_element(output.data, output.dtype, to + d, weighted[d] * factor);
}

// A sink is a score that takes weight and gives no value (Xiao et al. 2023, StreamingLLM).
inline void finish_row(const ost_attention &a, int32_t row, int32_t head, const float *weighted,
                       float max, float sum) {
  float keep = 1;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head] * kLog2E, whole = std::floor(sink);
    const float top = whole > max ? whole : max;
    keep = power_of_whole(max - top);
    const float weight = largest(power_of_two<5>(fill(sink), fill(whole)));
    sum = sum * keep + weight * power_of_whole(whole - top);
  }
  const int64_t to = a.tokens[row] * a.output.token_stride + head * a.output.head_stride;
  store_output(a.output, to, weighted, a.kv.value_dim, sum > 0 ? keep / sum : 0.0f);
}

// Keys first_key..last_key - 1 of a segment as groups; first_key is a multiple of 16.
template <class Math>
void fill_chunk(const ost_attention &a, const ost_segment &s, int32_t kv_head, int32_t first_key,
                int32_t num_groups, typename Math::Stored *ragged,
                Chunk<typename Math::Stored> &chunk) {
  using Stored = typename Math::Stored;
  const ost_kv &kv = a.kv;
  const Stored *keys = static_cast<const Stored *>(kv.keys);
  const Stored *values = static_cast<const Stored *>(kv.values);
  const int32_t *blocks = a.blocks + s.first_entry;
  chunk.first = first_key;
  chunk.num_groups = num_groups;
  for (int32_t g = 0; g < chunk.num_groups; ++g) {
    const int32_t key = first_key + g * kGroup, offset = key % kv.block_size;
    const int64_t block = blocks[key / kv.block_size];
    chunk.keys[g] = keys + key_group(kv, block, kv_head, offset);
    chunk.values[g] = values + value_group(kv, block, kv_head, offset);
  }
  // Slots that nobody has written may hold anything, and 0 times that need not be 0.
  const int32_t full = s.num_keys - first_key, rest = full % kGroup;
  if (rest == 0 || full / kGroup >= chunk.num_groups) return;
  const Stored *from = chunk.values[full / kGroup];
  std::memset(ragged, 0, value_group_size(kv) * sizeof(Stored));
  if constexpr (kHasCodes<Math>) {
    ragged += scales_size(kv);
    std::memcpy(scales_of(ragged), scales_of(from), rest * kScaleBytes);
  }
  for (int32_t offset = 0; offset < rest; ++offset)
    for (int32_t d = 0; d < kv.value_dim; ++d) {
      const int64_t place = value_place(Math::kPairs, kv.value_dim, offset, d);
      ragged[place] = from[place];
    }
  chunk.values[full / kGroup] = ragged;
}

// The first key of a segment that is looked at so that a row sees one of its keys: tiles take keys by
// twos of groups, which begin at the same positions whatever the segment.
inline int32_t first_key(const ost_segment &s, int32_t seen) {
  const int32_t key = (s.first_position + seen) / (2 * kGroup) * (2 * kGroup) - s.first_position;
  return key < 0 ? 0 : key;
}

// Rows of an item whose sections end.
template <class Math>
class SectionMerger {
 public:
  SectionMerger(const ost_attention &attention, const Task &task, const TaskScratch<Math> &scratch,
       const Setting &setting, int32_t first_row)
      : a_(attention), item_(*task.item), scratch_(scratch), setting_(setting), first_row_(first_row),
        per_token_(a_.num_heads / a_.kv.num_kv_heads), first_head_(task.kv_head * per_token_) {}

  // Rows from..to - 1 (of heads, counted from first_row on) leave a section behind.
  void leave(int32_t section, int32_t from, int32_t to) const {
    for (int32_t i = from; i < to; ++i) {
      if (scratch_.max[i] == kLowest) continue;
      put_away(section, i);
      std::memset(weighted(i), 0, setting_.value_stride * sizeof(float));
      std::memset(scratch_.sums + int64_t{i} * 16, 0, 16 * sizeof(float));
      scratch_.max[i] = kLowest;
    }
  }
  // All rows have seen all.
  void finish(int32_t num_rows) const {
    for (int32_t i = 0; i < num_rows; ++i) {
      const int32_t row = row_of(i), head = head_of(i);
      const bool is_first = scratch_.earlier_max[i] == kLowest;
      if (scratch_.max[i] != kLowest && (item_.first_partial >= 0 || !is_first))
        put_away(a_.positions[row] / a_.section_keys, i);
      if (item_.first_partial >= 0) continue;
      const RowAccumulator all = earlier(i);
      if (is_first)
        finish_row(a_, row, head, weighted(i), scratch_.max[i], sum(i));
      else
        finish_row(a_, row, head, all.weighted, *all.max, *all.sum);
    }
  }

 private:
  int32_t row_of(int32_t i) const { return first_row_ + i / per_token_; }
  int32_t head_of(int32_t i) const { return first_head_ + i % per_token_; }
  float *weighted(int32_t i) const { return scratch_.weighted + int64_t{i} * setting_.value_stride; }
  float sum(int32_t i) const { return total(load(scratch_.sums + int64_t{i} * 16)); }
  RowAccumulator earlier(int32_t i) const {
    return {scratch_.earlier + int64_t{i} * setting_.value_stride, scratch_.earlier_max + i,
            scratch_.earlier_sums + i};
  }
  // Adds what a row has gathered to the sections before, or leaves it as a partial.
  void put_away(int32_t section, int32_t i) const {
    const int32_t value_dim = setting_.value_dim;
    if (item_.first_partial < 0)
      return add_section(earlier(i), weighted(i), scratch_.max[i], sum(i), value_dim);
    const int64_t rows_before = int64_t{section - item_.first_section} *
                                (item_.last_row - item_.first_row);
    const int64_t partial = item_.first_partial + rows_before + row_of(i) - item_.first_row;
    float *out = a_.partials + (partial * a_.num_heads + head_of(i)) * (value_dim + 2);
    std::memcpy(out, weighted(i), value_dim * sizeof(float));
    out[value_dim] = scratch_.max[i];
    out[value_dim + 1] = sum(i);
  }

  const ost_attention &a_;
  const ost_item &item_;
  const TaskScratch<Math> &scratch_;
  const Setting &setting_;
  const int32_t first_row_, per_token_, first_head_;
};

// Rows first_row..last_row - 1 of an item.
template <class Math>
void attend_rows(const ost_attention &a, const Task &task, int32_t first_row, int32_t last_row) {
  const ost_item &item = *task.item;
  const int32_t kv_head = task.kv_head;
  Prefetcher prefetcher(a, task);
  const int32_t per_token = a.num_heads / a.kv.num_kv_heads, first_head = kv_head * per_token;
  // Neighbouring rows of sums do not fall on the same lines of a cache.
  const int32_t value_stride = (a.kv.value_dim + 15) / 16 * 16 + (a.kv.value_dim % 64 == 0) * 16;
  const Setting setting{a.kv.key_dim, a.kv.value_dim, value_stride,
                        a.scale * kLog2E, a.soft_cap};
  const int32_t num_rows = (last_row - first_row) * per_token;
  const int32_t max_groups = chunk_groups(num_rows);
  const TaskScratch<Math> scratch(setting, num_rows);
  const SectionMerger<Math> ends(a, task, scratch, setting, first_row);
  for (int32_t i = 0; i < num_rows; ++i) {
    const int64_t token = a.tokens[first_row + i / per_token], head = first_head + i % per_token;
    const int32_t later = i + 16;
    if (later < num_rows)
      prefetch_row(a, first_row + later / per_token, first_head + later % per_token);
    scratch.steps[i] = load_query(
        a.queries.data, a.queries.dtype,
        token * a.queries.token_stride + head * a.queries.head_stride, setting.key_dim,
        scratch.queries + int64_t{i} * setting.key_dim);
  }
  for (int32_t n = item.first_segment; n < item.last_segment; ++n) {
    const ost_segment &s = a.segments[n];
    const KeySpan within = keys_within(a, item, s);
    const int32_t from = s.first_row > first_row ? s.first_row : first_row;
    const int32_t to = s.last_row < last_row ? s.last_row : last_row;
    int32_t low = INT32_MAX, high = 0;
    for (int32_t row = from; row < to; ++row) {
      const int64_t seen = int64_t{a.positions[row]} + 1 - s.first_position;
      const int64_t below = a.window > 0 ? seen - a.window : 0;
      const int32_t last = static_cast<int32_t>(seen < 0 ? 0 : seen < within.end ? seen : within.end);
      const int64_t lowest = below < within.begin ? within.begin : below;
      const int32_t first = static_cast<int32_t>(lowest < last ? lowest : last);
      for (int32_t i = 0; i < per_token; ++i) {
        scratch.first[(row - first_row) * per_token + i] = first;
        scratch.last[(row - first_row) * per_token + i] = last;
      }
      if (first >= last) continue;
      low = first < low ? first : low;
      high = last > high ? last : high;
    }
    if (low >= high) continue;  // no row sees any of its keys
    const int32_t skip = (from - first_row) * per_token;
    const Rows<typename Math::Operand> rows{scratch.queries, scratch.weighted, scratch.max,  scratch.sums,
                                            scratch.first,   scratch.last,     scratch.steps};
    Chunk<typename Math::Stored> chunk;
    chunk.joined = scratch.joined;
    chunk.prefetcher = &prefetcher;
    for (int32_t key = first_key(s, low); key < high; key += chunk.num_groups * kGroup) {
      const int64_t end = end_of_chunk(a, s, key, max_groups * kGroup);
      const int32_t left = static_cast<int32_t>(end < high ? end : high) - key;
      fill_chunk<Math>(a, s, kv_head, key, (left + kGroup - 1) / kGroup, scratch.ragged, chunk);
      attend_chunk<Math>(chunk, rows.from(skip, setting), (to - from) * per_token, setting);
      const int32_t next = s.first_position + key + chunk.num_groups * kGroup;
      if (next % a.section_keys == 0)
        ends.leave(next / a.section_keys - 1, skip, skip + (to - from) * per_token);
    }
  }
  ends.finish(num_rows);
}

// An item's rows, as many at once as stay in the cache.
template <class Math>
void attend_item(const ost_attention &a, const Task &task) {
  const int32_t per_token = a.num_heads / a.kv.num_kv_heads, end = task.item->last_row;
  const int32_t step = per_token < kMaxRows ? kMaxRows / per_token : 1;
  for (int32_t row = task.item->first_row; row < end; row += step)
    attend_rows<Math>(a, task, row, row + step < end ? row + step : end);
}

// Whatever is stored and asked: codes as whole numbers, all else in float32.
inline void attend_any(const ost_attention &a, const Task &task) {
  if (a.kv.dtype == OST_KV_INT8)
    attend_item<CodeMath>(a, task);
  else if (a.kv.dtype == OST_FLOAT32)
    attend_item<FloatMath<Float32>>(a, task);
  else if (a.kv.dtype == OST_FLOAT16)
    attend_item<FloatMath<Float16>>(a, task);
  else
    attend_item<FloatMath<Bfloat16>>(a, task);
}

// A row's partials are its sections, in order.
inline void merge(const ost_attention &a, int32_t index, int32_t head) {
  const int32_t value_dim = a.kv.value_dim;
  float *weighted = static_cast<float *>(thread_scratch(value_dim * sizeof(float)));
  float max = kLowest, sum = 0;
  for (int32_t i = a.merge_starts[index]; i < a.merge_starts[index + 1]; ++i) {
    const float *in =
        a.partials + (int64_t{a.merge_partials[i]} * a.num_heads + head) * (value_dim + 2);
    add_section({weighted, &max, &sum}, in, in[value_dim], in[value_dim + 1], value_dim);
  }
  finish_row(a, a.merge_rows[index], head, weighted, max, sum);
}

}  // namespace
}  // namespace ost
