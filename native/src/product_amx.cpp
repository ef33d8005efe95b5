// How do rows go through tiles of a weight, by AMX?
//
// 32 rows at a time look at 32 outputs of the weight. The first of them wait for the memory; those
// behind find the tiles in the processor's cache.
#include <immintrin.h>

#include "product_kernels.h"

namespace ost {

namespace {

constexpr int kTileRows = 16;
constexpr int32_t kGroupRows = 32;
constexpr int32_t kAheadLines = 64;  // 4 KiB of the weight
constexpr int32_t kStepLines = 32;   // of a weight's tile, read for 32 inputs

// Sums in tiles 0 to 3 (rows x sides), inputs in 4 and 5, the weight in 6 and 7.
struct alignas(64) Shapes {
  uint8_t palette = 1, first_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit Shapes(int num_rows) {
    const int upper = num_rows < kTileRows ? num_rows : kTileRows;
    const int lower = num_rows > kTileRows ? num_rows - kTileRows : 1;
    rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(upper);
    rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(lower);
    rows[6] = rows[7] = kTileRows;
  }
};

// Rows that share the tiles' sums.
struct Group {
  int32_t first, num_rows;
};

// What is asked for meanwhile: so many lines in each step of 32 inputs.
struct Ahead {
  const uint16_t *next;
  int32_t num_lines;
};

inline __m512 widen(const uint16_t *numbers) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <bool kTall>
inline void sum_tile(const ost_product &p, int32_t row, const uint16_t *tile, Ahead ahead,
                     float *sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto *inputs = static_cast<const uint16_t *>(p.inputs.data) + row * p.inputs.stride;
  for (int32_t i = 0; i < p.num_inputs; i += 32, tile += 32 * kTileOutputs) {
    for (int line = 0; line < ahead.num_lines; ++line, ahead.next += 32)
      _mm_prefetch(reinterpret_cast<const char *>(ahead.next), _MM_HINT_T1);
    _tile_loadd(4, inputs + i, p.inputs.stride * 2);
    _tile_loadd(6, tile, kTileOutputs * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tile + 32, kTileOutputs * 4);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTall) {
      _tile_loadd(5, inputs + kTileRows * p.inputs.stride + i, p.inputs.stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kTileOutputs * 4);
  _tile_stored(1, sums + 16, kTileOutputs * 4);
  if constexpr (kTall) {
    _tile_stored(2, sums + kTileRows * kTileOutputs, kTileOutputs * 4);
    _tile_stored(3, sums + kTileRows * kTileOutputs + 16, kTileOutputs * 4);
  }
  asm volatile("" ::: "memory");  // the compiler does not see what tiles write
}

void put(const ost_product &p, Group group, const float *sums, int64_t output) {
  const auto *bias = static_cast<const uint16_t *>(p.bias);
  auto *outputs = static_cast<uint16_t *>(p.outputs.data) + group.first * p.outputs.stride + output;
  for (int row = 0; row < group.num_rows; ++row)
    for (int side = 0; side < kTileOutputs; side += 16) {
      __m512 sum = _mm512_load_ps(sums + row * kTileOutputs + side);
      if (bias != nullptr) sum = _mm512_add_ps(sum, widen(bias + output + side));
      auto *to = outputs + row * p.outputs.stride + side;
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
}

}  // namespace

void product_amx(const ost_product &p, int64_t first, int64_t last) {
  alignas(64) float sums[kGroupRows * kTileOutputs];
  const Shapes all(kGroupRows), rest(p.num_rows % kGroupRows);
  const int32_t num_groups = (p.num_rows + kGroupRows - 1) / kGroupRows;
  const int64_t tile_size = int64_t{kTileOutputs} * p.num_inputs;
  for (int64_t t = first; t < last; ++t) {
    const auto *tile = static_cast<const uint16_t *>(p.tiles) + t * tile_size;
    // A group alone asks for lines that it meets itself; several share the asking for the next tile,
    // so that the memory goes on while they compute.
    Ahead ahead{tile + kAheadLines * 32, kStepLines};
    if (num_groups > 1) ahead = {tile + tile_size, (kStepLines + num_groups - 1) / num_groups};
    for (int32_t row = 0; row < p.num_rows; row += kGroupRows) {
      const int32_t left = p.num_rows - row;
      const Group group{row, left < kGroupRows ? left : kGroupRows};
      if (row == 0 || group.num_rows < kGroupRows)
        _tile_loadconfig(group.num_rows < kGroupRows ? &rest : &all);
      group.num_rows > kTileRows ? sum_tile<true>(p, row, tile, ahead, sums)
                                 : sum_tile<false>(p, row, tile, ahead, sums);
      ahead.next += int64_t{ahead.num_lines} * p.num_inputs;
      put(p, group, sums, t * kTileOutputs);
    }
  }
  _tile_release();
}

}  // namespace ost
