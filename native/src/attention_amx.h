// How do 32 rows attend to a chunk of keys on AMX?
//
// Eight tiles: 2 x 2 of sums, two of queries or weights, two of keys or values. Keys of two groups,
// 32 dimensions at a time, are tiles as they lie, and so are 32 values that lie side by side; where
// blocks of 16 are not neighbours they do not, and are copied once per chunk, for all rows. Scores become weights
// by vectors, as everywhere.
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

// Sums += rows x columns; strides in elements.
template <bool kTall>
inline void multiply_tiles(const uint16_t *rows, int64_t row_stride, const uint16_t *left,
                           const uint16_t *right, int64_t column_stride) {
  _tile_loadd(4, rows, row_stride * 2);
  _tile_loadd(6, left, column_stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, right, column_stride * 2);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTall) {
    _tile_loadd(5, rows + kTileRows * row_stride, row_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Scores of two groups. The group behind the last one is the last one again.
template <bool kTall>
inline void score_tiles(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows,
                        const Setting &setting, int32_t group, float *scores, int32_t lines) {
  const int32_t other = group + 1 < chunk.num_groups ? group + 1 : group;
  zero_sums<kTall>();
  for (int32_t d = 0; d < setting.key_dim; d += 32) {
    chunk.ahead->ask(lines);
    multiply_tiles<kTall>(rows.queries + d, setting.key_dim, chunk.keys[group] + d * kGroup,
                          chunk.keys[other] + d * kGroup, 32);
  }
  store_sums<kTall>(scores, kScoreStride);
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

// 32 (or 16) columns of the weighted sums of up to 32 rows; rows behind num_rows are left alone.
template <bool kTall>
inline void gather_tiles(const uint16_t *const *joined, Span span, const uint16_t *weights,
                         int32_t dim, const Setting &setting,
                         float *weighted, int32_t num_rows, Ahead *ahead, int32_t lines) {
  const bool narrow = dim + 32 > setting.value_dim;  // the right tile is the left one again
  const int32_t right = narrow ? 0 : 32, stride = setting.value_stride;
  load_sums<kTall>(weighted + dim, stride);
  for (int32_t g = span.begin; g < span.end; g += 2) {
    const uint16_t *values = joined[g / 2] + 2 * dim;
    ahead->ask(lines);
    multiply_tiles<kTall>(weights + (g - span.begin) * kGroup, kScoreStride, values, values + right,
                          2 * setting.value_dim);
  }
  if (num_rows == (kTall ? 32 : 16) && !narrow) {
    store_sums<kTall>(weighted + dim, stride);
    return;
  }
  alignas(64) float sums[2 * kTileRows * 32];
  store_sums<kTall>(sums, 32);
  for (int32_t i = 0; i < num_rows; ++i)
    std::memcpy(weighted + int64_t{i} * stride + dim, sums + i * 32,
                (narrow ? 16 : 32) * sizeof(float));
}

// Up to 32 rows (16 unless kTall) over one chunk. joined is filled by whoever comes first.
template <bool kTall>
void attend_tiles(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows, int32_t num_rows,
                  const Setting &setting, const uint16_t **joined, bool ask) {
  Span span = groups_seen(rows.first, rows.last, num_rows, chunk.first, chunk.num_groups);
  if (span.begin >= span.end) return;
  span.begin = span.begin / 2 * 2;
  alignas(64) float scores[2 * kTileRows * kScoreStride];
  alignas(64) uint16_t weights[2 * kTileRows * kScoreStride];
  const int32_t groups = (span.end - span.begin + 1) / 2 * 2;
  const int32_t start = chunk.first + span.begin * kGroup;
  const int32_t steps = groups / 2 * (setting.key_dim / 32 + (setting.value_dim + 31) / 32);
  const int32_t lines = ask ? groups * (setting.key_dim + setting.value_dim) / 2 : 0;  // of the chunk
  const int32_t lines_per_row = lines / 4 / num_rows, lines_per_step = lines * 3 / 4 / steps;

  settle_memory();
  for (int32_t g = span.begin; g < span.end; g += 2)
    score_tiles<kTall>(chunk, rows, setting, g, scores + (g - span.begin) * kGroup,
                       lines_per_step);
  settle_memory();
  const int32_t end = chunk.first + chunk.num_groups * kGroup - start;
  for (int32_t i = 0; i < num_rows; ++i) {
    chunk.ahead->ask(lines_per_row);
    const int32_t last = rows.last[i] - start < end ? rows.last[i] - start : end;
    weigh_row<BrainMath, 3>(scores + i * kScoreStride, weights + i * kScoreStride, groups,
                            rows.first[i] - start, last, setting, rows.max + i, rows.sum + i,
                            rows.weighted + i * setting.value_stride);
  }
  for (int32_t g = span.begin; g < span.end; g += 2)
    if (joined[g / 2] == nullptr) joined[g / 2] = join_values(chunk, g, setting.value_dim);
  settle_memory();
  for (int32_t dim = 0; dim < setting.value_dim; dim += 32)
    gather_tiles<kTall>(joined, span, weights, dim, setting, rows.weighted, num_rows,
                        chunk.ahead, lines_per_step);
  settle_memory();
}

template <>
void attend_chunk<TileMath>(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &rows,
                            int32_t num_rows, const Setting &setting) {
  if (num_rows <= TileMath::kFewRows) {
    attend_chunk<BrainMath>(chunk, rows, num_rows, setting);
    return;
  }
  const uint16_t *joined[kChunkGroups / 2] = {};
  for (int32_t row = 0; row < num_rows; row += 32) {
    const int32_t left = num_rows - row < 32 ? num_rows - row : 32;
    if (left > kTileRows)
      attend_tiles<true>(chunk, rows.from(row, setting), left, setting, joined, row == 0);
    else
      attend_tiles<false>(chunk, rows.from(row, setting), left, setting, joined, row == 0);
  }
}

}  // namespace
}  // namespace ost
