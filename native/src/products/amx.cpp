// AMX products of a few rows.
//
// 32 rows at a time look at 32 outputs of the weight. The first of them wait for the memory; those
// behind find the tiles in the processor's cache.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "products/amx.h"
#include "products/kernels.h"

namespace ost {

namespace {

using tiles::kTileRows;
using tiles::Shapes;
using tiles::widen;

constexpr int32_t kGroupRows = 32;
constexpr int32_t kStepLines = 32;  // of a weight's tile, read for 32 inputs

// Lines of 64 bytes after which a group alone meets what it asks for: from memory into the level 2
// cache, and once more, when it is near, into the first. Asked once, a fifth less arrives.
constexpr int32_t kFarLines = 256, kNearLines = 64;

// Rows that share the tiles' sums.
struct Group {
  int32_t first, num_rows;
};

// What a group alone asks for in a step of 32 inputs: what it meets itself. From a multiple of what a
// step reads, so that no step asks across the end of a small page: weights lie anywhere, and a sixth
// less arrives where it does. A loop on purpose: laid out line by line it brings an eighth less.
inline void prefetch_own_tiles(const char *step) {
#pragma GCC unroll 1
  for (int line = 0; line < kStepLines; ++line, step += 64) {
    _mm_prefetch(step + kNearLines * 64, _MM_HINT_T0);
    _mm_prefetch(step + kFarLines * 64, _MM_HINT_T1);
  }
}

inline const char *step_of(const uint16_t *tile) {
  const uintptr_t bytes = kStepLines * 64;
  return reinterpret_cast<const char *>(reinterpret_cast<uintptr_t>(tile) / bytes * bytes);
}

// Several groups share the asking for the next tile, so that the memory goes on while they compute.
template <int kLines>
inline void prefetch_next_tiles(const char *next) {
#pragma GCC unroll 1
  for (int line = 0; line < kLines; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T1);
}

// A tile of the weight and a group of kGroups; part is which share of the next tile it asks for.
template <bool kTall, int kGroups>
inline void sum_tile(const ost_product &p, int32_t row, const uint16_t *tile, float *sums) {
  constexpr int kLines = (kStepLines + kGroups - 1) / kGroups;
  const uint16_t *after = tile + int64_t{kTileOutputs} * p.num_inputs;
  const int64_t part = int64_t{row / kGroupRows} * kLines * (p.num_inputs / 32);  // lines
  const char *next_line = kGroups == 1 ? step_of(tile) : reinterpret_cast<const char *>(after) + part * 64;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto *inputs = static_cast<const uint16_t *>(p.inputs.data) + row * p.inputs.stride;
  for (int32_t i = 0; i < p.num_inputs; i += 32, tile += 32 * kTileOutputs) {
    kGroups == 1 ? prefetch_own_tiles(next_line) : prefetch_next_tiles<kLines>(next_line);
    next_line += kLines * 64;
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

// A row's 32 outputs are a line of the cache. The weight that streamed by has driven that line out,
// and to have it back before each store would take as long as a fifth of the weight: so it is
// written past the cache, where it is whole.
struct Lines {
  uint16_t *first;
  int64_t stride;
  int64_t width;  // numbers of each, at most 32
  bool are_whole;
};

inline void put_line(const Lines &lines, int row, __m512 left, __m512 right) {
  uint16_t *to = lines.first + row * lines.stride;
  const auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left));
  if (lines.are_whole) return _mm512_stream_si512(reinterpret_cast<__m512i *>(to), line);
  const __mmask32 within = static_cast<__mmask32>((uint64_t{1} << lines.width) - 1);
  _mm512_mask_storeu_epi16(to, within, line);
}

void put(const ost_product &p, Group group, const float *sums, int64_t output) {
  auto *first = static_cast<uint16_t *>(p.outputs.data) + group.first * p.outputs.stride + output;
  const int64_t width = std::min<int64_t>(kTileOutputs, p.num_outputs - output);
  const Lines lines{first, p.outputs.stride, width,
                    width == kTileOutputs && reinterpret_cast<uintptr_t>(first) % 64 == 0 &&
                        p.outputs.stride % kTileOutputs == 0};
  uint16_t bias[kTileOutputs] = {};
  if (p.bias != nullptr)
    std::memcpy(bias, static_cast<const uint16_t *>(p.bias) + output,
                static_cast<size_t>(width) * sizeof *bias);
  const __m512 left = widen(bias), right = widen(bias + 16);
  for (int row = 0; row < group.num_rows; ++row, sums += kTileOutputs)
    put_line(lines, row, _mm512_add_ps(_mm512_load_ps(sums), left),
             _mm512_add_ps(_mm512_load_ps(sums + 16), right));
}

template <int kGroups>
void multiply(const ost_product &p, int64_t first, int64_t last) {
  alignas(64) float sums[kGroupRows * kTileOutputs];
  const Shapes all(kGroupRows), rest(p.num_rows % kGroupRows);
  const bool has_both = kGroups > 1 && p.num_rows % kGroupRows != 0;
  _tile_loadconfig(p.num_rows < kGroupRows ? &rest : &all);
  for (int64_t t = first; t < last; ++t) {
    const auto *tile = static_cast<const uint16_t *>(p.tiles) + t * kTileOutputs * p.num_inputs;
    for (int32_t row = 0; row < p.num_rows; row += kGroupRows) {
      const int32_t left = p.num_rows - row;
      const Group group{row, left < kGroupRows ? left : kGroupRows};
      if (has_both && (row == 0 || group.num_rows < kGroupRows))
        _tile_loadconfig(row == 0 ? &all : &rest);
      group.num_rows > kTileRows ? sum_tile<true, kGroups>(p, row, tile, sums)
                                 : sum_tile<false, kGroups>(p, row, tile, sums);
      put(p, group, sums, t * kTileOutputs);
    }
  }
  _tile_release();
  _mm_sfence();  // what went past the cache is there before anybody is told that it is
}

}  // namespace

void product_amx(const ost_product &product, int64_t first, int64_t last) {
  static_assert(kFewTileRows <= 2 * kGroupRows, "a kernel for each number of groups");
  (product.num_rows > kGroupRows ? multiply<2> : multiply<1>)(product, first, last);
}

}  // namespace ost
