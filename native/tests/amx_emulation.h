// The tile instructions of AMX over plain arrays, so that their kernels are tested on any processor
// with AVX512_BF16. Included before the kernels' own files by OSTINATO_EMULATE_AMX in CMakeLists.txt.
//
// Definition: Intel's Software Developer's Manual, volume 2, TILELOADD and TDPBF16PS. What the
// processor would refuse (a tile that is not configured, sizes that do not fit) ends the program.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) char content[kRows][kRowBytes] = {};
};

inline Tile &tile(int index) {
  static thread_local Tile tiles[kTiles];
  return tiles[index];
}

inline void require(bool holds, const char *what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline Tile &configured(int index) {
  require(tile(index).rows > 0 && tile(index).row_bytes > 0, "a tile is not configured");
  return tile(index);
}

// Byte 0: palette; from byte 16: bytes of a row, 2 bytes each; from byte 48: rows, a byte each.
inline void load_config(const void *config) {
  const auto *bytes = static_cast<const uint8_t *>(config);
  require(bytes[0] == 1, "palette 1 is the only one");
  for (int i = 0; i < kTiles; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    require(row_bytes <= kRowBytes && bytes[48 + i] <= kRows, "a tile is too large");
    tile(i) = Tile{};
    tile(i).row_bytes = row_bytes;
    tile(i).rows = bytes[48 + i];
  }
}

inline void release() {
  for (int i = 0; i < kTiles; ++i) tile(i) = Tile{};
}

inline void zero(int index) { std::memset(configured(index).content, 0, sizeof tile(index).content); }

inline void load(int index, const void *from, int64_t stride) {
  zero(index);
  Tile &to = tile(index);
  for (int row = 0; row < to.rows; ++row)
    std::memcpy(to.content[row], static_cast<const char *>(from) + row * stride,
                static_cast<size_t>(to.row_bytes));
}

inline void store(int index, void *to, int64_t stride) {
  const Tile &from = configured(index);
  for (int row = 0; row < from.rows; ++row)
    std::memcpy(static_cast<char *>(to) + row * stride, from.content[row],
                static_cast<size_t>(from.row_bytes));
}

inline float number(const Tile &from, int row, int index) {
  uint16_t half;
  std::memcpy(&half, from.content[row] + 2 * index, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// sums[m][n] += sum over k of a[m][2k] * b[k][2n], and of a[m][2k + 1] * b[k][2n + 1].
inline void multiply_bfloat16(int sums_index, int a_index, int b_index) {
  Tile &sums = configured(sums_index);
  const Tile &a = configured(a_index), &b = configured(b_index);
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows,
          "sizes of tiles do not fit");
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      float first = 0, second = 0, sum;
      for (int k = 0; k < b.rows; ++k) {
        first += number(a, m, 2 * k) * number(b, k, 2 * n);
        second += number(a, m, 2 * k + 1) * number(b, k, 2 * n + 1);
      }
      std::memcpy(&sum, sums.content[m] + 4 * n, sizeof sum);
      sum += first + second;
      std::memcpy(sums.content[m] + 4 * n, &sum, sizeof sum);
    }
}

}  // namespace amx

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) amx::load_config(config)
#define _tile_release() amx::release()
#define _tile_zero(tile) amx::zero(tile)
#define _tile_loadd(tile, from, stride) amx::load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) amx::load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx::store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) amx::multiply_bfloat16(sums, a, b)
