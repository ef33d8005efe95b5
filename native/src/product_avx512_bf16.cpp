// How do up to eight rows go through tiles of a weight, by vectors of bfloat16 pairs?
#include <immintrin.h>

#include <cstring>

#include "product_kernels.h"

namespace ost {

namespace {

constexpr int64_t kAheadBytes = 2048;  // further, and lines are gone again before they are needed

inline __m512bh spread(const uint16_t *pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

inline __m512bh take(const uint16_t *tile) {
  _mm_prefetch(reinterpret_cast<const char *>(tile) + kAheadBytes, _MM_HINT_T0);
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile));
}

inline __m512 widen(const uint16_t *numbers) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

inline void put(const ost_product &p, int row, int64_t output, __m512 sum) {
  const auto *bias = static_cast<const uint16_t *>(p.bias);
  if (bias != nullptr) sum = _mm512_add_ps(sum, widen(bias + output));
  auto *to = static_cast<uint16_t *>(p.outputs.data) + row * p.outputs.stride + output;
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
}

// Few rows leave registers free: kTurns sums take turns, so that none waits for its last addition.
template <int kRows, int kTurns>
void multiply(const ost_product &p, int64_t first, int64_t last) {
  const auto *inputs = static_cast<const uint16_t *>(p.inputs.data);
  const auto *tile = static_cast<const uint16_t *>(p.tiles) + first * kTileOutputs * p.num_inputs;
  for (int64_t t = first; t < last; ++t) {
    __m512 sums[kTurns][kRows][2];
    for (auto &turn : sums)
      for (auto &row : turn) row[0] = row[1] = _mm512_setzero_ps();
    for (int32_t i = 0; i < p.num_inputs; i += 2 * kTurns) {
      for (int turn = 0; turn < kTurns; ++turn, tile += 64) {
        const __m512bh left = take(tile), right = take(tile + 32);
        for (int row = 0; row < kRows; ++row) {
          const __m512bh input = spread(inputs + row * p.inputs.stride + i + 2 * turn);
          sums[turn][row][0] = _mm512_dpbf16_ps(sums[turn][row][0], left, input);
          sums[turn][row][1] = _mm512_dpbf16_ps(sums[turn][row][1], right, input);
        }
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int side = 0; side < 2; ++side) {
        __m512 sum = sums[0][row][side];
        for (int turn = 1; turn < kTurns; ++turn) sum = _mm512_add_ps(sum, sums[turn][row][side]);
        put(p, row, t * kTileOutputs + 16 * side, sum);
      }
  }
}

}  // namespace

void product_avx512_bf16(const ost_product &product, int64_t first, int64_t last) {
  constexpr ProductKernel kernels[] = {multiply<1, 4>, multiply<2, 4>, multiply<3, 2>,
                                       multiply<4, 2>, multiply<5, 2>, multiply<6, 2>,
                                       multiply<7, 1>, multiply<8, 1>};
  kernels[product.num_rows - 1](product, first, last);
}

}  // namespace ost
