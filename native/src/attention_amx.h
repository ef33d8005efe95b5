// How do 32 rows attend to a chunk of keys on AMX?
//
// Eight tiles: 2 x 2 of sums, two of queries or weights, two of keys or values. Keys of two groups,
// 32 dimensions at a time, are tiles as they lie, and so are 32 values that lie side by side; where
// blocks of 16 are not neighbours they do not, and are copied once per chunk, for all rows.
//
// Scores of 32 keys become weights, by vectors, as soon as they are there: they never leave the level 1
// cache. So the maximum of a chunk is not known, and a row keeps an old one until a score exceeds it by
// so much that its weight would be too large; sums and weights are to whatever it is (the lazy rescaling
// of FlashAttention 4).
//
// Included after attention_tile.h.
#pragma once

namespace ost {
namespace {

constexpr int kTileRows = 16;

// Bfloat16 keys and queries of a size that is whole tiles.
struct TileMath : BrainMath {
  static constexpr int kFewRows = 2;  // up to here vectors are as fast
};

// All eight tiles are of 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile instructions do not tell the compiler which memory they read.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 and 1 (2 and 3) are sums of the upper (lower) 16 rows for left and right columns.
template <bool kTall>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kTall>
inline void load_sums(const float *from, int64_t stride) {
  _tile_loadd(0, from, stride * 4);
  _tile_loadd(1, from + 16, stride * 4);
  if constexpr (kTall) {
    _tile_loadd(2, from + kTileRows * stride, stride * 4);
    _tile_loadd(3, from + kTileRows * stride + 16, stride * 4);
  }
}

template <bool kTall>
inline void store_sums(float *to, int64_t stride) {
  _tile_stored(0, to, stride * 4);
  _tile_stored(1, to + 16, stride * 4);
  if constexpr (kTall) {
    _tile_stored(2, to + kTileRows * stride, stride * 4);
    _tile_stored(3, to + kTileRows * stride + 16, stride * 4);
  }
}

// The larger half of what 16 numbers of float have, side by side with that of 16 others, each rounded to
// the nearest.
inline void store_two(uint16_t *p, Vec a, Vec b) {
  const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
  std::memcpy(p, &both, sizeof both);
}
inline bool any_above(Vec a, Vec b, float limit) {
  const __m512 most = _mm512_set1_ps(limit);
  return (_mm512_cmp_ps_mask(a.v, most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(b.v, most, _CMP_GT_OQ)) != 0;
}

constexpr int kPair = 2 * kGroup;  // keys whose scores are computed at a time
constexpr int kWeightStride = kChunkGroups * kGroup + 32;  // rows do not fall on the same lines
constexpr float kSlack = 16.0f;  // weights may reach 2 to it before a row's maximum is renewed

// Up to 32 rows over a chunk. Its pairs of groups begin at even ones.
struct Tile {
  Rows<uint16_t> rows;
  int32_t num_rows, first_pair, last_pair;
  int32_t all_from = 0, all_to = INT32_MAX;  // keys that all rows see, of the segment
  Vec sums[2 * kTileRows];                   // of the weights in this chunk, lane by lane
  alignas(64) uint16_t weights[2 * kTileRows * kWeightStride];

  Tile(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &all, int32_t count)
      : rows(all), num_rows(count) {
    const Span span = groups_seen(rows.first, rows.last, count, chunk.first, chunk.num_groups);
    first_pair = span.begin / 2;
    last_pair = span.begin < span.end ? (span.end + 1) / 2 : first_pair;
    for (int32_t i = 0; i < count; ++i) {
      all_from = rows.first[i] > all_from ? rows.first[i] : all_from;
      all_to = rows.last[i] < all_to ? rows.last[i] : all_to;
      sums[i] = fill(0.0f);
    }
  }
};

// Scores of a tile's rows and 32 keys, and what becomes of them between two products of tiles. A product
// takes 16 cycles, in which the vector units are idle: so scores become weights while the next ones
// are computed, two rows per product.
class Weighing {
 public:
  Weighing(const Chunk<uint16_t> &chunk, const Setting &setting)
      : chunk_(chunk), setting_(setting), scale_(setting.soft_cap > 0 ? 1.0f : setting.scale) {}

  void begin(Tile &tile, int32_t pair, float *scores) {
    const int32_t first = chunk_.first + pair * kPair;
    tile_ = &tile;
    pair_ = pair - tile.first_pair;
    scores_ = scores;
    row_ = 0;
    from_ = first;
    is_whole_ = first >= tile.all_from && first + kPair <= tile.all_to &&
                pair * 2 + 1 < chunk_.num_groups && setting_.soft_cap == 0;
  }
  void step() {
    if (tile_ == nullptr) return;
    weigh_next();
    if (tile_ != nullptr) weigh_next();
  }
  void finish() {
    while (tile_ != nullptr) weigh_next();
  }
  bool is_of(const Tile &tile) const { return tile_ == &tile; }

 private:
  __attribute__((always_inline)) void weigh_next() {
    Tile &tile = *tile_;
    const int32_t i = row_;
    float *scores = scores_ + i * kPair;
    if (!is_whole_) hide(scores, i);
    const Vec by = fill(scale_);
    Vec less = fill(-tile.rows.max[i]);
    Vec a = multiply_add(load(scores), by, less), b = multiply_add(load(scores + kGroup), by, less);
    if (__builtin_expect(any_above(a, b, kSlack), 0)) {
      less = fill(-renew(i, scores));
      a = multiply_add(load(scores), by, less);
      b = multiply_add(load(scores + kGroup), by, less);
    }
    a = power_of_two<3>(a);
    b = power_of_two<3>(b);
    store_two(tile.weights + i * kWeightStride + pair_ * kPair, a, b);
    tile.sums[i] = tile.sums[i] + (a + b);
    if (++row_ == tile.num_rows) tile_ = nullptr;
  }

  __attribute__((noinline)) void hide(float *scores, int32_t i) {
    if (setting_.soft_cap > 0) cap_scores(scores, 2, setting_);
    const int32_t end = chunk_.first + chunk_.num_groups * kGroup;
    const int32_t last = tile_->rows.last[i] < end ? tile_->rows.last[i] : end;
    hide_unseen(scores, 2, tile_->rows.first[i] - from_, last - from_);
  }

  // A row's maximum becomes the largest of these scores, and all that it has gathered shrinks.
  __attribute__((noinline)) float renew(int32_t i, const float *scores) {
    Tile &tile = *tile_;
    const float top = largest_score(scores, 2) * scale_;
    const float keep = std::exp2(tile.rows.max[i] - top);
    tile.rows.max[i] = top;
    tile.rows.sum[i] *= keep;
    tile.sums[i] = tile.sums[i] * fill(keep);
    scale_row(tile.rows.weighted + int64_t{i} * setting_.value_stride, setting_.value_stride, keep);
    uint16_t *weights = tile.weights + i * kWeightStride;
    for (int32_t g = 0; g < 2 * pair_; ++g)
      store_brain(weights + g * kGroup, load_bfloat16(weights + g * kGroup) * fill(keep));
    return top;
  }

  const Chunk<uint16_t> &chunk_;
  const Setting &setting_;
  const float scale_;  // of scores, to base 2; capped ones have it
  Tile *tile_ = nullptr;
  float *scores_ = nullptr;
  int32_t row_ = 0, pair_ = 0, from_ = 0;
  bool is_whole_ = false;
};

// Sums += rows x columns; strides in elements.
template <bool kTall>
inline void multiply_tiles(const uint16_t *rows, int64_t row_stride, const uint16_t *left,
                           const uint16_t *right, int64_t column_stride, Weighing &weighing) {
  _tile_loadd(4, rows, row_stride * 2);
  _tile_loadd(6, left, column_stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  weighing.step();
  _tile_loadd(7, right, column_stride * 2);
  _tile_dpbf16ps(1, 4, 7);
  weighing.step();
  if constexpr (kTall) {
    _tile_loadd(5, rows + kTileRows * row_stride, row_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    weighing.step();
    _tile_dpbf16ps(3, 5, 7);
    weighing.step();
  }
}

// Scores of 32 keys. The group behind the last one is the last one again.
template <bool kTall>
inline void score_pair(const Chunk<uint16_t> &chunk, const Tile &tile, int32_t pair,
                       const Setting &setting, float *scores, Weighing &weighing, int32_t lines) {
  const int32_t group = 2 * pair, other = group + 1 < chunk.num_groups ? group + 1 : group;
  zero_sums<kTall>();
  for (int32_t d = 0; d < setting.key_dim; d += 32) {
    chunk.ahead->ask(lines);
    multiply_tiles<kTall>(tile.rows.queries + d, setting.key_dim, chunk.keys[group] + d * kGroup,
                          chunk.keys[other] + d * kGroup, 32, weighing);
  }
  weighing.finish();
  store_sums<kTall>(scores, kPair);
}

// Values of two groups as one tile's rows.
inline const uint16_t *join_values(const Chunk<uint16_t> &chunk, int32_t group, int32_t value_dim) {
  const int64_t size = int64_t{kGroup} * value_dim;
  const uint16_t *values = chunk.values[group];
  const bool pair = group + 1 < chunk.num_groups;
  if (pair && chunk.values[group + 1] == values + size) return values;
  uint16_t *joined = chunk.joined + group * size;
  std::memcpy(joined, values, size * sizeof(uint16_t));
  if (pair)
    std::memcpy(joined + size, chunk.values[group + 1], size * sizeof(uint16_t));
  else
    std::memset(joined + size, 0, size * sizeof(uint16_t));
  return joined;
}

// 32 (or 16) columns of the weighted sums of a tile; rows behind num_rows are left alone.
template <bool kTall>
inline void gather_columns(const Chunk<uint16_t> &chunk, const uint16_t *const *joined,
                           const Tile &tile, int32_t dim, const Setting &setting,
                           Weighing &weighing, int32_t lines) {
  const bool narrow = dim + 32 > setting.value_dim;  // the right tile is the left one again
  const int32_t stride = setting.value_stride;
  float *weighted = tile.rows.weighted + dim;
  load_sums<kTall>(weighted, stride);
  for (int32_t pair = tile.first_pair; pair < tile.last_pair; ++pair) {
    chunk.ahead->ask(lines);
    const uint16_t *values = joined[pair] + 2 * dim;
    multiply_tiles<kTall>(tile.weights + (pair - tile.first_pair) * kPair, kWeightStride, values,
                          values + (narrow ? 0 : 32), 2 * setting.value_dim, weighing);
  }
  if (tile.num_rows == (kTall ? 32 : 16) && !narrow) {
    store_sums<kTall>(weighted, stride);
    return;
  }
  alignas(64) float sums[2 * kTileRows * 32];
  store_sums<kTall>(sums, 32);
  settle_memory();
  for (int32_t i = 0; i < tile.num_rows; ++i)
    std::memcpy(weighted + int64_t{i} * stride, sums + i * 32, (narrow ? 16 : 32) * sizeof(float));
}

// Up to 64 rows over one chunk: two tiles, so that keys and values that come from the level 2 cache are
// met by both.
template <bool kTall>
void attend_tiles(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows, int32_t num_rows,
                  const Setting &setting, const uint16_t *const *joined, int32_t lines) {
  Tile tiles[2] = {{chunk, rows, num_rows < 32 ? num_rows : 32},
                   {chunk, rows.from(32, setting), num_rows < 32 ? 0 : num_rows - 32}};
  const int32_t num_tiles = num_rows > 32 ? 2 : 1;
  alignas(64) float scores[2][2 * kTileRows * kPair];
  Weighing weighing(chunk, setting);
  int32_t turn = 0;
  settle_memory();
  for (int32_t pair = 0; 2 * pair < chunk.num_groups; ++pair)
    for (int32_t t = 0; t < num_tiles; ++t) {
      if (pair < tiles[t].first_pair || pair >= tiles[t].last_pair) continue;
      score_pair<kTall>(chunk, tiles[t], pair, setting, scores[turn], weighing, lines);
      settle_memory();
      weighing.begin(tiles[t], pair, scores[turn]);
      turn = 1 - turn;
    }
  for (int32_t dim = 0; dim < setting.value_dim; dim += 32)
    for (int32_t t = 0; t < num_tiles; ++t) {
      if (tiles[t].first_pair >= tiles[t].last_pair) continue;
      if (weighing.is_of(tiles[t])) weighing.finish();
      settle_memory();
      gather_columns<kTall>(chunk, joined, tiles[t], dim, setting, weighing, lines);
    }
  weighing.finish();
  settle_memory();
  for (int32_t t = 0; t < num_tiles; ++t)
    for (int32_t i = 0; i < tiles[t].num_rows; ++i)
      tiles[t].rows.sum[i] += total(tiles[t].sums[i]);
}

template <>
void attend_chunk<TileMath>(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows,
                            int32_t num_rows, const Setting &setting) {
  if (num_rows <= TileMath::kFewRows) {
    attend_chunk<BrainMath>(chunk, rows, num_rows, setting);
    return;
  }
  const uint16_t *joined[kChunkGroups / 2 + 1];
  for (int32_t g = 0; g < chunk.num_groups; g += 2)
    joined[g / 2] = join_values(chunk, g, setting.value_dim);
  // What is asked for in all, by as many pairs of products as there are.
  const int32_t lines = (32 + (num_rows + 31) / 32 - 1) / ((num_rows + 31) / 32);
  for (int32_t row = 0; row < num_rows; row += 64) {
    const int32_t left = num_rows - row < 64 ? num_rows - row : 64;
    if (left > kTileRows)
      attend_tiles<true>(chunk, rows.from(row, setting), left, setting, joined, lines);
    else
      attend_tiles<false>(chunk, rows.from(row, setting), left, setting, joined, lines);
  }
}

}  // namespace
}  // namespace ost
