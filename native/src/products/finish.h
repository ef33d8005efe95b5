// Rounds finished sums where the models round, and writes them.
#pragma once

#include <immintrin.h>

#include "ops/vector.h"
#include "products/amx.h"
#include "products/kernels.h"

namespace ost {
namespace {

constexpr int32_t kStripRows = 2 * tiles::kTileRows;
constexpr int64_t kTileSums = 16 * tiles::kTileRows;  // floats
constexpr int64_t kStripSums = 4 * kTileSums;         // of a strip of rows, for 32 outputs

enum class Finish {
  kNothing,  // there are none
  kWrite,
  kOpen,     // silu of gates; the outputs are for kThrough
  kGelu,     // likewise, gelu by tanh
  kThrough   // times what such gates let through
};

// Sums of a strip for 32 outputs: upper left, upper right, lower left, lower right tile.
struct Sums {
  Finish finish = Finish::kNothing;
  int32_t num_rows = 0;
  const float *numbers = nullptr;
  int32_t width = kTileOutputs;  // outputs that there are, of 32
  alignas(64) uint16_t bias[kTileOutputs] = {};
  uint16_t *outputs = nullptr;
  int64_t stride = 0;
  const uint16_t *gates = nullptr;  // (num_rows, 32)
  bool are_lines = false;  // what is written of a row is a line of the cache
};

// 16 numbers that are finished but for the last rounding.
template <Finish kFinish>
inline Floats finished(const float *numbers, const uint16_t *bias, const uint16_t *gates) {
  const __m512 sum = _mm512_add_ps(_mm512_load_ps(numbers), tiles::widen(bias));
  const Floats value = reinterpret_cast<Floats>(sum);
  if constexpr (kFinish == Finish::kWrite) return value;
  const Floats rounded = BFloat16::round(value);
  if constexpr (kFinish == Finish::kOpen) return silu(rounded);
  if constexpr (kFinish == Finish::kGelu) return gelu_by_tanh(rounded);
  return rounded * load<BFloat16>(gates);
}

// One row of finished sums. Outputs go past the cache where they can: to read a line first, only to
// write all of it, would take more of the memory's time than the weights do.
template <Finish kFinish>
inline void put(const Sums &sums, int32_t row) {
  const float *numbers =
      sums.numbers + row / tiles::kTileRows * 2 * kTileSums + row % tiles::kTileRows * 16;
  const uint16_t *gates = sums.gates + (kFinish == Finish::kThrough ? row * kTileOutputs : 0);
  const Floats left = finished<kFinish>(numbers, sums.bias, gates);
  const Floats right = finished<kFinish>(numbers + kTileSums, sums.bias + 16, gates + 16);
  const __m512bh line = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(right),
                                            reinterpret_cast<__m512>(left));
  auto *outputs = reinterpret_cast<__m512i *>(sums.outputs + row * sums.stride);
  const auto bits = reinterpret_cast<__m512i>(line);
  if constexpr (kFinish == Finish::kOpen || kFinish == Finish::kGelu)
    return _mm512_storeu_si512(outputs, bits);
  if (sums.are_lines) return _mm512_stream_si512(outputs, bits);
  const __mmask32 within = static_cast<__mmask32>((uint64_t{1} << sums.width) - 1);
  _mm512_mask_storeu_epi16(outputs, within, bits);
}

}  // namespace
}  // namespace ost
