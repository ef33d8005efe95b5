// How do a few rows attend to a chunk of keys?
//
// A row is one query head of one token. It carries a running maximum, sum and weighted sum of values
// (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
// FlashAttention), so that chunks and segments follow one another and nothing is merged. Scores are
// to base 2: the scale takes in log2(e).
//
// Included after one simd_*.h, attention_math.h and attention_ahead.h.
#pragma once

namespace ost {
namespace {

constexpr int kScoreStride = kChunkGroups * kGroup + 16;  // rows do not fall on the same lines
constexpr float kUnseen = -1e36f;  // score of a key that a row does not see
constexpr float kLowest = -1e29f;  // maximum over nothing: above kUnseen, so that weights are 0


// Bytes that one step of a Math takes, of 32 elements.
template <class Math>
constexpr int kStepBytes = 32 * sizeof(typename Math::Stored);

// Asks ahead for as much as a step takes that is kWide side by side.
template <class Math, int kWide>
inline void ask_for_step(Ahead *ahead, int32_t step) {
  constexpr int kBytes = kWide * kStepBytes<Math>;
  if constexpr (kBytes >= kLineBytes)
    ahead->ask(kBytes / kLineBytes);
  else if (step % (kLineBytes / kBytes) == 0)
    ahead->ask(1);
}

// What is the same for all rows of a call.
struct Setting {
  int32_t key_dim, value_dim, value_stride;  // of a weighted sum: value_dim or somewhat more
  float scale;                               // of scores as they are multiplied out, to base 2
  float soft_cap;
};

// Groups of keys that lie anywhere, in order; first is the first one's position in its segment.
template <class Stored>
struct Chunk {
  const Stored *keys[kChunkGroups], *values[kChunkGroups];
  Ahead *ahead;
  Stored *joined;  // room for a copy of the values
  int32_t first, num_groups;
};

// Neighbouring rows; row i sees keys first[i]..last[i] - 1 of the segment.
template <class Operand>
struct Rows {
  const Operand *queries;
  float *weighted, *max, *sums;  // sums of weights in 16 lanes each
  const int32_t *first, *last;
  const float *steps;  // what the whole numbers of each one's query are worth

  Rows from(int32_t row, const Setting &setting) const {
    return {queries + int64_t{row} * setting.key_dim,
            weighted + int64_t{row} * setting.value_stride,
            max + row,
            sums + int64_t{row} * 16,
            first + row,
            last + row,
            steps + row};
  }
};

// The groups of a chunk that some of the rows see.
struct Span {
  int32_t begin, end;
};
inline Span groups_seen(const int32_t *first, const int32_t *last, int rows, int32_t chunk_first,
                        int32_t num_groups) {
  int32_t low = INT32_MAX, high = 0;
  for (int i = 0; i < rows; ++i) {
    if (first[i] >= last[i]) continue;
    low = first[i] < low ? first[i] : low;
    high = last[i] > high ? last[i] : high;
  }
  low = low > chunk_first ? (low - chunk_first) / kGroup : 0;
  high = high > chunk_first ? (high - chunk_first + kGroup - 1) / kGroup : 0;
  return {low, high < num_groups ? high : num_groups};
}

// scores[row][group * 16 ..] for kWide groups; asks ahead for a line for each that is read, if at all.
template <class Math, int kRows, int kWide, bool kAsks>
inline void score(const typename Math::Operand *queries, int32_t key_dim,
                  const typename Math::Stored *const *keys, const float *steps, float *scores,
                  Ahead *ahead) {
  typename Math::Sum sums[kRows][kWide];
  for (int i = 0; i < kRows; ++i)
    for (int g = 0; g < kWide; ++g) sums[i][g] = Math::nothing();
  for (int32_t d = 0; d < key_dim; d += 2) {
    typename Math::Two stored[kWide];
    for (int g = 0; g < kWide; ++g) stored[g] = Math::take(keys[g] + d * kGroup, kGroup);
    if constexpr (kAsks) ask_for_step<Math, kWide>(ahead, d / 2);
    for (int i = 0; i < kRows; ++i) {
      const auto query = Math::spread(queries + i * key_dim + d);
      for (int g = 0; g < kWide; ++g) sums[i][g] = Math::add_product(sums[i][g], query, stored[g]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int g = 0; g < kWide; ++g)
      store(scores + i * kScoreStride + g * kGroup, Math::scores(sums[i][g], steps[i], keys[g]));
}

// cap * tanh(x * scale / cap), to base 2; tanh(y) = (e^2y - 1) / (e^2y + 1).
inline void cap_scores(float *scores, int32_t groups, const Setting &setting) {
  const Vec steep = fill(2 * setting.scale / setting.soft_cap), one = fill(1.0f);
  const Vec cap = fill(setting.soft_cap * 1.44269504f);
  for (int32_t g = 0; g < groups; ++g) {
    const Vec x = larger(fill(-60.0f), smaller(load(scores + g * kGroup) * steep, fill(60.0f)));
    const Vec power = power_of_two<5>(x);
    store(scores + g * kGroup, cap * ((power - one) / (power + one)));
  }
}

inline void hide_unseen(float *scores, int32_t groups, int32_t first, int32_t last) {
  if (first <= 0 && last >= groups * kGroup) return;
  const Vec unseen = fill(kUnseen);
  for (int32_t g = 0; g < groups; ++g) {
    const int32_t from = first - g * kGroup, to = last - g * kGroup;
    if (from > 0 || to < kGroup)
      store(scores + g * kGroup, keep_lanes(load(scores + g * kGroup), from, to, unseen));
  }
}

inline float largest_score(const float *scores, int32_t groups) {
  Vec even = load(scores), odd = even;
  int32_t g = 1;
  for (; g + 1 < groups; g += 2) {
    even = larger(even, load(scores + g * kGroup));
    odd = larger(odd, load(scores + g * kGroup + kGroup));
  }
  if (g < groups) even = larger(even, load(scores + g * kGroup));
  return largest(larger(even, odd));
}

inline void scale_row(float *row, int32_t size, float factor) {
  const Vec by = fill(factor);
  for (int32_t d = 0; d < size; d += 16) store(row + d, load(row + d) * by);
}

// Scores of a row become weights; what the row has gathered so far is scaled to the new maximum.
template <class Math, int kTerms>
inline void weigh_row(float *scores, typename Math::Weight *weights, int32_t groups, int32_t first,
                      int32_t last, const Setting &setting, float *max, float *sums,
                      float *weighted) {
  if (setting.soft_cap > 0) cap_scores(scores, groups, setting);
  const float scale = setting.soft_cap > 0 ? 1.0f : setting.scale;
  hide_unseen(scores, groups, first, last);
  const float top = largest_score(scores, groups) * scale;
  const float old_max = *max, new_max = top > old_max ? top : old_max;
  const Vec by = fill(scale), less = fill(-new_max);
  Vec even = fill(0.0f), odd = even;
  int32_t g = 0;
  for (; g + 1 < groups; g += 2) {
    const Vec a = power_of_two<kTerms>(multiply_add(load(scores + g * kGroup), by, less));
    const Vec b = power_of_two<kTerms>(multiply_add(load(scores + (g + 1) * kGroup), by, less));
    Math::store_weight(weights + g * kGroup, a);
    Math::store_weight(weights + (g + 1) * kGroup, b);
    even = even + a;
    odd = odd + b;
  }
  if (g < groups) {
    const Vec a = power_of_two<kTerms>(multiply_add(load(scores + g * kGroup), by, less));
    Math::store_weight(weights + g * kGroup, a);
    even = even + a;
  }
  if (new_max != old_max) {
    const float keep = std::exp2(old_max - new_max);
    scale_row(weighted, setting.value_stride, keep);
    scale_row(sums, 16, keep);
    *max = new_max;
  }
  store(sums, load(sums) + (even + odd));
}

// Weights times the scales of values become whole numbers, each group by itself: what they are rounded to
// does not depend on how keys are cut into chunks. Leaves what a whole number of each group is worth.
inline void round_weights(float *weights, const int8_t *const *values, int32_t groups, int16_t *whole,
                          float *steps) {
  static_assert(kChunkGroups == 16, "the sizes of a chunk's groups are a vector");
  alignas(64) float sizes[kChunkGroups] = {}, per_unit[kChunkGroups];
  Vec zero = fill(0.0f);
  for (int32_t g = 0; g < groups; ++g) {
    const Vec scaled = load(weights + g * kGroup) * load(scales_of(values[g]));
    store(weights + g * kGroup, scaled);
    sizes[g] = largest(scaled);
    zero = multiply_add(scaled, fill(0.0f), zero);
  }
  const Vec size = larger(load(sizes), fill(kSmallestSize));
  store(per_unit, fill(kMostInt16) / size);
  store(steps, multiply_add(size, fill(1 / kMostInt16), fill(total(zero))));  // NaN where a weight is
  for (int32_t g = 0; g < groups; ++g)
    store_int16(whole + g * kGroup, load(weights + g * kGroup) * fill(per_unit[g]));
}

// Adds sums of codes over one group to what rows have gathered, and begins anew; other sums go on.
template <class Math, int kRows, int kWide>
inline void end_group(typename Math::Sum (&sums)[kRows][kWide], const float *steps, int32_t group,
                      int32_t stride, float *weighted) {
  if constexpr (kHasCodes<Math>) {
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kWide; ++v) {
        Math::put_back(weighted + i * stride + v * 16, sums[i][v], steps[i * kChunkGroups + group]);
        sums[i][v] = Math::nothing();
      }
  }
}

// weighted[row][16 * kWide] += weights[row][..] * values[..][16 * kWide]
template <class Math, int kRows, int kWide, bool kAsks>
inline void gather(const typename Math::Operand *weights, const typename Math::Stored *const *values,
                   int32_t groups, int32_t dim, const Setting &setting, const float *steps,
                   float *weighted, Ahead *ahead) {
  constexpr int kStep = Math::kPairs ? 2 : 1;  // elements per dimension of what is taken at once
  typename Math::Sum sums[kRows][kWide];
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kWide; ++v)
      sums[i][v] = Math::gathered(weighted + i * setting.value_stride + dim + v * 16);
  for (int32_t g = 0; g < groups; ++g) {
    for (int32_t pair = 0; pair < kGroup / 2; ++pair) {
      const int64_t place = int64_t{2} * pair * setting.value_dim + dim * kStep;
      typename Math::Two stored[kWide];
      for (int v = 0; v < kWide; ++v)
        stored[v] = Math::take(values[g] + place + v * 16 * kStep, setting.value_dim);
      if constexpr (kAsks) ask_for_step<Math, kWide>(ahead, pair);
      for (int i = 0; i < kRows; ++i) {
        const auto weight = Math::spread(weights + i * kScoreStride + g * kGroup + 2 * pair);
        for (int v = 0; v < kWide; ++v) sums[i][v] = Math::add_product(sums[i][v], weight, stored[v]);
      }
    }
    end_group<Math>(sums, steps, g, setting.value_stride, weighted + dim);
  }
  if constexpr (!kHasCodes<Math>)
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kWide; ++v)
        Math::put_back(weighted + i * setting.value_stride + dim + v * 16, sums[i][v]);
}

// The last value_dim % 16 dimensions: nothing past a row's end is read.
template <class Math, int kRows>
inline void gather_tail(const typename Math::Operand *weights,
                        const typename Math::Stored *const *values, int32_t groups,
                        const Setting &setting, const float *steps, float *weighted) {
  const int32_t dim = setting.value_dim / 16 * 16, left = setting.value_dim - dim;
  typename Math::Sum sums[kRows][1];
  for (int i = 0; i < kRows; ++i)
    sums[i][0] = Math::gathered(weighted + i * setting.value_stride + dim);
  for (int32_t g = 0; g < groups; ++g) {
    for (int32_t pair = 0; pair < kGroup / 2; ++pair) {
      typename Math::Stored copy[32] = {};
      const typename Math::Stored *from = values[g] + int64_t{2} * pair * setting.value_dim;
      for (int32_t i = 0; i < left; ++i) {
        copy[Math::kPairs ? 2 * i : i] = from[Math::kPairs ? 2 * (dim + i) : dim + i];
        copy[Math::kPairs ? 2 * i + 1 : 16 + i] =
            from[Math::kPairs ? 2 * (dim + i) + 1 : setting.value_dim + dim + i];
      }
      const auto stored = Math::take(copy, 16);
      for (int i = 0; i < kRows; ++i) {
        const auto weight = Math::spread(weights + i * kScoreStride + g * kGroup + 2 * pair);
        sums[i][0] = Math::add_product(sums[i][0], weight, stored);
      }
    }
    end_group<Math>(sums, steps, g, setting.value_stride, weighted + dim);
  }
  if constexpr (!kHasCodes<Math>)
    for (int i = 0; i < kRows; ++i)
      Math::put_back(weighted + i * setting.value_stride + dim, sums[i][0]);
}

// kRows rows over one chunk.
template <class Math, int kRows, bool kAsks>
void attend_tile(const Chunk<typename Math::Stored> &chunk, const Rows<typename Math::Operand> &rows,
                 const Setting &setting) {
  const Span span = groups_seen(rows.first, rows.last, kRows, chunk.first, chunk.num_groups);
  const int32_t groups = span.end - span.begin, start = chunk.first + span.begin * kGroup;
  if (groups <= 0) return;
  alignas(64) float scores[kRows * kScoreStride];
  alignas(64) typename Math::Operand weights[kRows * kScoreStride];
  alignas(64) float steps[kRows * kChunkGroups];  // of weights, by group, if they are whole numbers

  Ahead *const ahead = chunk.ahead;
  const auto *keys = chunk.keys + span.begin, *values = chunk.values + span.begin;
  constexpr int kWide = kRows <= 2 && Math::kWide == 1 ? 2 : Math::kWide;
  int32_t g = 0;
  for (; g + kWide <= groups; g += kWide)
    score<Math, kRows, kWide, kAsks>(rows.queries, setting.key_dim, keys + g, rows.steps,
                                     scores + g * kGroup, ahead);
  for (; g < groups; ++g) {
    score<Math, kRows, 1, false>(rows.queries, setting.key_dim, keys + g, rows.steps,
                                 scores + g * kGroup, ahead);
    if constexpr (kAsks) ahead->ask(setting.key_dim / 2 * kStepBytes<Math> / kLineBytes);
  }
  if constexpr (kAsks && kHasCodes<Math>) ahead->ask(2 * groups);  // scales

  for (int i = 0; i < kRows; ++i) {
    float *const row = scores + i * kScoreStride;
    typename Math::Weight *to;
    if constexpr (kHasCodes<Math>)
      to = row;
    else
      to = weights + i * kScoreStride;
    weigh_row<Math, sizeof(typename Math::Operand) == 2 ? 3 : 5>(
        row, to, groups, rows.first[i] - start, rows.last[i] - start, setting, rows.max + i,
        rows.sums + i * 16, rows.weighted + i * setting.value_stride);
    if constexpr (kHasCodes<Math>)
      round_weights(row, values, groups, weights + i * kScoreStride, steps + i * kChunkGroups);
  }

  int32_t dim = 0;
  for (; dim + 16 * kWide <= setting.value_dim; dim += 16 * kWide)
    gather<Math, kRows, kWide, kAsks>(weights, values, groups, dim, setting, steps, rows.weighted,
                                      ahead);
  for (; dim + 16 <= setting.value_dim; dim += 16)
    gather<Math, kRows, 1, false>(weights, values, groups, dim, setting, steps, rows.weighted, ahead);
  if (dim < setting.value_dim)
    gather_tail<Math, kRows>(weights, values, groups, setting, steps, rows.weighted);
}

// Any number of rows up to kRows, by the tile of that size.
template <class Math, int kRows = Math::kRows>
inline void attend_few(int32_t num_rows, const Chunk<typename Math::Stored> &chunk,
                       const Rows<typename Math::Operand> &rows, const Setting &setting,
                       bool asks) {
  if (num_rows == kRows) {
    if (asks)
      attend_tile<Math, kRows, true>(chunk, rows, setting);
    else
      attend_tile<Math, kRows, false>(chunk, rows, setting);
  } else if constexpr (kRows > 1) {
    attend_few<Math, kRows - 1>(num_rows, chunk, rows, setting, asks);
  }
}

// All rows of a segment over one chunk: tiles of like sizes.
template <class Math>
void attend_chunk(const Chunk<typename Math::Stored> &chunk, const Rows<typename Math::Operand> &rows,
                  int32_t num_rows, const Setting &setting) {
  const int32_t num_tiles = (num_rows + Math::kRows - 1) / Math::kRows;
  int32_t row = 0;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    const int32_t left = num_tiles - tile, take = (num_rows - row + left - 1) / left;
    attend_few<Math>(take, chunk, rows.from(row, setting), setting, tile == 0);
    row += take;
  }
}

}  // namespace
}  // namespace ost
