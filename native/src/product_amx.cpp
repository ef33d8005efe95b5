// How do up to 32 rows go through tiles of a weight, by AMX?
#include <immintrin.h>

#include "product_kernels.h"

namespace ost {

namespace {

constexpr int kTileRows = 16;
constexpr int32_t kAheadLines = 64;  // 4 KiB of the weight

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

inline __m512 widen(const uint16_t *numbers) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <bool kTall>
inline void sum_tile(const ost_product &p, const uint16_t *tile, float *sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto *inputs = static_cast<const uint16_t *>(p.inputs.data);
  for (int32_t i = 0; i < p.num_inputs; i += 32, tile += 32 * kTileOutputs) {
    for (int line = 0; line < 32; ++line)
      _mm_prefetch(reinterpret_cast<const char *>(tile + (line + kAheadLines) * 32), _MM_HINT_T0);
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

void put(const ost_product &p, const float *sums, int64_t output) {
  const auto *bias = static_cast<const uint16_t *>(p.bias);
  for (int row = 0; row < p.num_rows; ++row)
    for (int side = 0; side < kTileOutputs; side += 16) {
      __m512 sum = _mm512_load_ps(sums + row * kTileOutputs + side);
      if (bias != nullptr) sum = _mm512_add_ps(sum, widen(bias + output + side));
      auto *to = static_cast<uint16_t *>(p.outputs.data) + row * p.outputs.stride + output + side;
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
}

}  // namespace

void product_amx(const ost_product &p, int64_t first, int64_t last) {
  alignas(64) float sums[kMostTileRows * kTileOutputs];
  const Shapes shapes(p.num_rows);
  _tile_loadconfig(&shapes);
  for (int64_t t = first; t < last; ++t) {
    const auto *tile = static_cast<const uint16_t *>(p.tiles) + t * kTileOutputs * p.num_inputs;
    p.num_rows > kTileRows ? sum_tile<true>(p, tile, sums) : sum_tile<false>(p, tile, sums);
    put(p, sums, t * kTileOutputs);
  }
  _tile_release();
}

}  // namespace ost
