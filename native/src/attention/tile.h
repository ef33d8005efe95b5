// Vector attention: a few rows and a chunk of keys.
//
// A row is one query head of one token. It carries a running maximum, sum and weighted sum of values
// (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
// FlashAttention), so that chunks and segments follow one another and nothing is merged. Scores are
// to base 2: the scale takes in log2(e).
//
// Maxima are rounded up to whole numbers, so that they scale weights and sums by powers of two, which
// rounds nothing. So no bit hangs on when a maximum was renewed, hence none on how keys are cut into
// chunks and segments: a sum takes the keys of a section one by one, in the order of their positions.
//
// Included after one simd/*.h, attention/math.h and attention/prefetch.h.
#pragma once

namespace ost {
namespace {

constexpr int kScoreStride = kChunkGroups * kGroup + 16;  // rows do not fall on the same lines
constexpr float kMasked = -1e36f;  // score of a key that a row does not see
constexpr float kLowest = -1e29f;  // maximum over nothing: above kUnseen, so that weights are 0


// Bytes that one step of a Math takes, of 32 elements.
template <class Math>
constexpr int kStepBytes = 32 * sizeof(typename Math::Stored);

// Prefetches as much as one step of kWide tiles side by side reads.
template <class Math, int kWide>
inline void prefetch_step(Prefetcher *prefetcher, int32_t step) {
  constexpr int kBytes = kWide * kStepBytes<Math>;
  if constexpr (kBytes >= kLineBytes)
    prefetcher->prefetch(kBytes / kLineBytes);
  else if (step % (kLineBytes / kBytes) == 0)
    prefetcher->prefetch(1);
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
  Prefetcher *prefetcher;
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

// scores[row][group * 16 ..] for kWide groups; prefetches a line for each that is read, if kPrefetches.
template <class Math, int kRows, int kWide, bool kPrefetches>
inline void score(const typename Math::Operand *queries, int32_t key_dim,
                  const typename Math::Stored *const *keys, const float *steps, float *scores,
                  Prefetcher *prefetcher) {
  typename Math::Sum sums[kRows][kWide];
  for (int i = 0; i < kRows; ++i)
    for (int g = 0; g < kWide; ++g) sums[i][g] = Math::nothing();
  for (int32_t d = 0; d < key_dim; d += 2) {
    typename Math::Two stored[kWide];
    for (int g = 0; g < kWide; ++g) stored[g] = Math::take(keys[g] + d * kGroup, kGroup);
    if constexpr (kPrefetches) prefetch_step<Math, kWide>(prefetcher, d / 2);
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
    const Vec power = power_of_two<5>(x, fill(0.0f));
    store(scores + g * kGroup, cap * ((power - one) / (power + one)));
  }
}

inline void hide_unseen(float *scores, int32_t groups, int32_t first, int32_t last) {
  if (first <= 0 && last >= groups * kGroup) return;
  const Vec unseen = fill(kMasked);
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

// 2 to a whole number that is not above 0.
inline float power_of_whole(float whole) {
  if (!(whole >= -126.0f)) return 0.0f;
  return float_of_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
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
  const float top = std::ceil(largest_score(scores, groups) * scale), old_max = *max;
  if (top > old_max) {
    const float keep = power_of_whole(old_max - top);
    scale_row(weighted, setting.value_stride, keep);
    scale_row(sums, 16, keep);
    *max = top;
  }
  const Vec by = fill(scale), row_max = fill(*max);
  Vec sum = load(sums);
  for (int32_t g = 0; g < groups; ++g) {
    const Vec weight = power_of_two<kTerms>(load(scores + g * kGroup) * by, row_max);
    Math::store_weight(weights + g * kGroup, weight);
    sum = sum + weight;
  }
  store(sums, sum);
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
  store(per_unit, fill(kMaxInt16) / size);
  store(steps, multiply_add(size, fill(1 / kMaxInt16), fill(total(zero))));  // NaN where a weight is
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
template <class Math, int kRows, int kWide, bool kPrefetches>
inline void gather(const typename Math::Operand *weights, const typename Math::Stored *const *values,
                   int32_t groups, int32_t dim, const Setting &setting, const float *steps,
                   float *weighted, Prefetcher *prefetcher) {
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
      if constexpr (kPrefetches) prefetch_step<Math, kWide>(prefetcher, pair);
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
template <class Math, int kRows, bool kPrefetches>
void attend_tile(const Chunk<typename Math::Stored> &chunk, const Rows<typename Math::Operand> &rows,
                 const Setting &setting) {
  const Span span = groups_seen(rows.first, rows.last, kRows, chunk.first, chunk.num_groups);
  const int32_t groups = span.end - span.begin, start = chunk.first + span.begin * kGroup;
  if (groups <= 0) return;
  alignas(64) float scores[kRows * kScoreStride];
  alignas(64) typename Math::Operand weights[kRows * kScoreStride];
  alignas(64) float steps[kRows * kChunkGroups];  // of weights, by group, if they are whole numbers

  Prefetcher *const prefetcher = chunk.prefetcher;
  const auto *keys = chunk.keys + span.begin, *values = chunk.values + span.begin;
  constexpr int kWide = kRows <= 2 && Math::kWide == 1 ? 2 : Math::kWide;
  int32_t g = 0;
  for (; g + kWide <= groups; g += kWide)
    score<Math, kRows, kWide, kPrefetches>(rows.queries, setting.key_dim, keys + g, rows.steps,
                                     scores + g * kGroup, prefetcher);
  for (; g < groups; ++g) {
    score<Math, kRows, 1, false>(rows.queries, setting.key_dim, keys + g, rows.steps,
                                 scores + g * kGroup, prefetcher);
    if constexpr (kPrefetches) prefetcher->prefetch(setting.key_dim / 2 * kStepBytes<Math> / kLineBytes);
  }
  if constexpr (kPrefetches && kHasCodes<Math>) prefetcher->prefetch(2 * groups);  // scales

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
    gather<Math, kRows, kWide, kPrefetches>(weights, values, groups, dim, setting, steps, rows.weighted,
                                      prefetcher);
  for (; dim + 16 <= setting.value_dim; dim += 16)
    gather<Math, kRows, 1, false>(weights, values, groups, dim, setting, steps, rows.weighted, prefetcher);
  if (dim < setting.value_dim)
    gather_tail<Math, kRows>(weights, values, groups, setting, steps, rows.weighted);
}

// Any number of rows up to kRows, by the tile of that size.
template <class Math, int kRows = Math::kRows>
inline void attend_few(int32_t num_rows, const Chunk<typename Math::Stored> &chunk,
                       const Rows<typename Math::Operand> &rows, const Setting &setting,
                       bool prefetches) {
  if (num_rows == kRows) {
    if (prefetches)
      attend_tile<Math, kRows, true>(chunk, rows, setting);
    else
      attend_tile<Math, kRows, false>(chunk, rows, setting);
  } else if constexpr (kRows > 1) {
    attend_few<Math, kRows - 1>(num_rows, chunk, rows, setting, prefetches);
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
