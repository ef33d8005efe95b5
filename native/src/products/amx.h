// What the products by AMX have in common: how tile registers are used.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ost {
namespace tiles {

constexpr int kTileRows = 16;

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

}  // namespace tiles
}  // namespace ost
