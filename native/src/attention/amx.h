// AMX attention: 32 rows and a chunk of keys.
//
// Eight tiles: 2 x 2 of sums, two of queries or weights, two of keys or values. Keys of two groups,
// 32 dimensions at a time, are tiles as they lie, and so are 32 values that lie side by side; where
// blocks of 16 are not neighbours they do not, and are copied once per chunk, for all rows.
//
// A product takes 16 cycles of the tile unit, and the rest of the core need not wait: what the tiles
// of sums held is put away while the first products of the next sums are under way, and beside each
// product two rows of scores become weights (attention/softmax_tile.h). So the weighted sums of 32 rows wait
// for the first scores of the next 32, beside which their own last scores are weighed.
//
// Included after attention/tile.h.
#pragma once

#include "attention/softmax_tile.h"

namespace ost {
namespace {

constexpr int kTileRows = 16;
constexpr int kMaxSteps = 16;  // products along a sum: of all dimensions, or of a chunk's pairs
constexpr int kMaxKeyDim = 32 * kMaxSteps;

// Bfloat16 keys and queries of a size that is whole tiles. A tile instruction sums 32 products in an
// order of its own, so a single row goes through tiles as many do, and runs are whole twos of groups.
struct TileMath : BrainMath {};

// All eight tiles are of 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

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

// 32 x 32 sums: of 32 rows by 32 columns, 32 elements of each at a time. Strides are in bytes.
struct Sums {
  const uint16_t *rows;
  int64_t row_step, row_stride, column_stride;
  const uint16_t *left[kMaxSteps], *right[kMaxSteps];  // columns
  int32_t num_steps;
};

// Where 32 x 32 sums belong.
struct Place {
  float *at;
  int64_t stride;  // in bytes

  float *below() const { return at + kTileRows * stride / int64_t{sizeof(float)}; }
};

// What tile n of sums held is put away, and what it is to be added to is fetched, or nothing.
#define OST_BEGIN_TILE(n, old_at, from_at)                              \
  _tile_stored(n, old_at, old.stride);                                  \
  if constexpr (kFetches) {                                             \
    _tile_loadd(n, from_at, from.stride);                               \
  } else {                                                              \
    _tile_zero(n);                                                      \
  }

// The first products of sums, while the last sums are put away.
template <bool kFetches>
inline void begin_sums(const Sums &s, const Place &old, const Place &from) {
  _tile_loadd(4, s.rows, s.row_stride);
  _tile_loadd(6, s.left[0], s.column_stride);
  OST_BEGIN_TILE(0, old.at, from.at)
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, s.right[0], s.column_stride);
  OST_BEGIN_TILE(1, old.at + 16, from.at + 16)
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, s.rows + kTileRows / 2 * s.row_stride, s.row_stride);
  OST_BEGIN_TILE(2, old.below(), from.below())
  _tile_dpbf16ps(2, 5, 6);
  OST_BEGIN_TILE(3, old.below() + 16, from.below() + 16)
  _tile_dpbf16ps(3, 5, 7);
}
#undef OST_BEGIN_TILE

// The products of steps begin..end - 1.
template <bool kWeighs>
__attribute__((always_inline)) inline void go_on(const Sums &s, int32_t begin, int32_t end,
                                                 Weigher &weigher) {
  const int64_t row_stride = s.row_stride, column_stride = s.column_stride;
  const int64_t below = kTileRows / 2 * row_stride;
  const uint16_t *rows = s.rows + begin * s.row_step;
  for (int32_t i = begin; i < end; ++i) {
    _tile_loadd(4, rows, row_stride);
    _tile_loadd(6, s.left[i], column_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWeighs) weigher.weigh_two<true>();
    _tile_loadd(7, s.right[i], column_stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kWeighs) weigher.weigh_two<true>();
    _tile_loadd(5, rows + below, row_stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kWeighs) weigher.weigh_two<true>();
    _tile_dpbf16ps(3, 5, 7);
    if constexpr (kWeighs) weigher.weigh_two<true>();
    rows += s.row_step;
  }
}

// A walk of tiles of rows over a chunk.
class TileWalk {
 public:
  TileWalk(const Chunk<uint16_t> &chunk, const Setting &setting, int32_t num_tiles)
      : chunk_(chunk), setting_(setting), weighing_(chunk, setting),
        prefetches_often_(num_tiles < 4), lines_(lines_at_once(num_tiles)) {
    for (int32_t g = 0; g < chunk.num_groups; g += 2)
      joined_[g / 2] = join_values(chunk, g, setting.value_dim);
  }

  void add(const Rows<uint16_t> &rows, int32_t num_rows) {
    Tile &tile = tiles_[turn_];
    tile.begin(chunk_, rows, num_rows);
    const int32_t num_pairs = tile.last_pair - tile.first_pair;
    if (num_pairs <= 0) return;
    for (int32_t pair = 0; pair < num_pairs; ++pair) {
      score(tile, tile.first_pair + pair);
      if (pair == 0) gather();
    }
    last_ = &tile;
    turn_ = 1 - turn_;
  }
  void finish() {
    gather();
    put_away();
  }

 private:
  // Lines prefetched at once, so that in all as much is prefetched as is read: before each 32 x 32 sums, or,
  // where memory decides, before each step of theirs.
  int32_t lines_at_once(int32_t num_tiles) const {
    const int32_t columns = (setting_.value_dim + 31) / 32;
    const int32_t of_pair = setting_.key_dim + setting_.value_dim;
    const int32_t lines = prefetches_often_ ? 32 : of_pair * kMaxPairs / (kMaxPairs + columns);
    return (lines + num_tiles - 1) / num_tiles;
  }

  void put_away() {
    _tile_stored(0, old_.at, old_.stride);
    _tile_stored(1, old_.at + 16, old_.stride);
    _tile_stored(2, old_.below(), old_.stride);
    _tile_stored(3, old_.below() + 16, old_.stride);
    settle_memory();
    take_scores();
    old_ = {spare_, kPair * sizeof(float)};
  }
  // Scores that have been put away are to be weighed.
  void take_scores() {
    weighing_.finish();
    if (scored_ != nullptr) weighing_.begin(scored_, scored_pair_);
    scored_ = nullptr;
  }

  // Sums that remain in the tiles; what they are added to is fetched from somewhere, or nothing.
  template <bool kFetches>
  void compute(const Sums &sums, const Place &from) {
    settle_memory();
    chunk_.prefetcher->prefetch(lines_);
    begin_sums<kFetches>(sums, old_, from);
    settle_memory();
    take_scores();
    Weigher weigher = weighing_.weigher;
    for (int32_t step = 1; step < sums.num_steps;) {
      int32_t end = sums.num_steps;
      if (prefetches_often_) {
        chunk_.prefetcher->prefetch(lines_);
        end = step + 1;
      }
      if (weigher.left >= 8) {
        if (end > step + weigher.left / 8) end = step + weigher.left / 8;
        go_on<true>(sums, step, end, weigher);
      } else {
        go_on<false>(sums, step, end, weigher);
      }
      step = end;
    }
    weighing_.weigher = weigher;
    settle_memory();
  }

  // Scores of 32 keys. The group behind the last one is the last one again.
  void score(Tile &tile, int32_t pair) {
    const int32_t group = 2 * pair, other = group + 1 < chunk_.num_groups ? group + 1 : group;
    Sums sums{tile.rows.queries, 32, 2 * setting_.key_dim, 64, {}, {}, setting_.key_dim / 32};
    for (int32_t i = 0; i < sums.num_steps; ++i) {
      sums.left[i] = chunk_.keys[group] + i * 32 * kGroup;
      sums.right[i] = chunk_.keys[other] + i * 32 * kGroup;
    }
    compute<false>(sums, old_);
    scored_ = &tile;
    scored_pair_ = pair;
    old_ = {weighing_.room(), kPair * sizeof(float)};
  }

  // The weighted sums of the tile before.
  void gather() {
    if (last_ == nullptr) return;
    if (scored_ == last_) put_away();
    if (weighing_.is_of(last_)) weighing_.finish();
    last_->end();
    for (int32_t dim = 0; dim < setting_.value_dim; dim += 32) gather_columns(*last_, dim);
    last_ = nullptr;
  }
  // 32 (or 16) columns of them; rows behind num_rows are left alone.
  void gather_columns(const Tile &tile, int32_t dim) {
    const bool narrow = dim + 32 > setting_.value_dim;  // the right tile is the left one again
    const int32_t stride = setting_.value_stride;
    const Place place{tile.rows.weighted + dim, stride * int64_t{sizeof(float)}};
    Sums sums{tile.weights[tile.first_pair][0], kTallRows * kPair, 2 * kPair,
              4 * setting_.value_dim, {}, {}, tile.last_pair - tile.first_pair};
    for (int32_t i = 0; i < sums.num_steps; ++i) {
      sums.left[i] = joined_[tile.first_pair + i] + 2 * dim;
      sums.right[i] = sums.left[i] + (narrow ? 0 : 32);
    }
    compute<true>(sums, place);
    old_ = place;
    if (tile.num_rows == kTallRows && !narrow) return;
    old_ = {spare_, kPair * sizeof(float)};
    put_away();
    for (int32_t i = 0; i < tile.num_rows; ++i)
      std::memcpy(place.at + int64_t{i} * stride, spare_ + i * kPair,
                  (narrow ? 16 : 32) * sizeof(float));
  }

  const Chunk<uint16_t> &chunk_;
  const Setting &setting_;
  Weighing weighing_;
  const bool prefetches_often_;
  const int32_t lines_;
  Tile *last_ = nullptr, *scored_ = nullptr;  // to be gathered; whose scores the tiles hold
  int32_t scored_pair_ = 0, turn_ = 0;
  Place old_{spare_, kPair * sizeof(float)};  // of what the tiles of sums hold
  const uint16_t *joined_[kMaxPairs];
  alignas(64) float spare_[kTallRows * kPair];
  Tile tiles_[2];
};

template <>
void attend_chunk<TileMath>(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows,
                            int32_t num_rows, const Setting &setting) {
  TileWalk walk(chunk, setting, (num_rows + kTallRows - 1) / kTallRows);
  for (int32_t row = 0; row < num_rows; row += kTallRows)
    walk.add(rows.from(row, setting), num_rows - row < kTallRows ? num_rows - row : kTallRows);
  walk.finish();
}

}  // namespace
}  // namespace ost
