// How do many rows go through tiles of a weight while a core multiplies all the time?
//
// A core brings two pairs of tiles from its level 2 cache while it multiplies one pair with another,
// and no more: of what it multiplies, half has to be in the level 1 cache. So a chunk of the weight, 32
// outputs by 512 inputs, stays there while a block of rows passes by in strips of 32, and the block
// stays in level 2 while all of the weight passes by:
//
//     weight tile 0   chunk 0: strip 0, strip 1, ...   chunk 1: strip 0, strip 1, ...
//     weight tile 1   chunk 0: ...
//
// Between chunks sums wait as floats. Finished ones are rounded and written a row or two at a time
// between the next strip's products, for the memory takes single lines slowly.
#include <immintrin.h>

#include <algorithm>

#include "product_kernels.h"
#include "product_tiles.h"
#include "scratch.h"

namespace ost {

namespace {

using tiles::kTileRows;
using tiles::Shapes;
using tiles::widen;

constexpr int32_t kStripRows = 2 * kTileRows;
constexpr int32_t kStepInputs = 32;             // what one product of tiles takes
constexpr int32_t kStepLines = 32;              // of the weight, for 32 inputs
constexpr int32_t kChunkSteps = 16;             // 32 KiB of the weight
constexpr int64_t kBlockBytes = 768 << 10;      // of rows, in a level 2 cache of 2 MiB
constexpr int64_t kMostStrips = 16;             // of a block, whose sums are in level 2 as well
constexpr int32_t kPutRows = kStripRows / kChunkSteps;  // in each step, until all are written
constexpr int64_t kTileSums = 16 * kTileRows;   // floats
constexpr int64_t kStripSums = 4 * kTileSums;

int64_t strips_of(const ost_product &p) { return (p.num_rows + kStripRows - 1) / kStripRows; }

// Blocks are equally large, up to a strip.
int64_t strips_per_block(const ost_product &p) {
  const int64_t fitting = kBlockBytes / (int64_t{kStripRows} * p.num_inputs * 2);
  const int64_t most = std::max<int64_t>(1, std::min(kMostStrips, fitting));
  const int64_t num_blocks = (strips_of(p) + most - 1) / most;
  return (strips_of(p) + num_blocks - 1) / num_blocks;
}

constexpr uint16_t kNoBias[kTileOutputs] = {};

// Sums of a strip for 32 outputs: upper left, upper right, lower left, lower right tile.
struct Sums {
  const float *numbers = nullptr;
  uint16_t *outputs = nullptr;
  const uint16_t *bias = nullptr;  // of these outputs
  int32_t num_rows = 0;
};

// Rounds and writes one row of finished sums.
inline void put(const Sums &sums, int32_t row, int64_t stride) {
  const float *numbers = sums.numbers + row / kTileRows * 2 * kTileSums + row % kTileRows * 16;
  const __m512 left = _mm512_add_ps(_mm512_load_ps(numbers), widen(sums.bias));
  const __m512 right = _mm512_add_ps(_mm512_load_ps(numbers + kTileSums), widen(sums.bias + 16));
  _mm512_storeu_si512(sums.outputs + row * stride,
                      reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left)));
}

// A strip and a chunk of a weight's tile.
struct Pass {
  const uint16_t *inputs;
  int64_t stride;  // of the inputs
  int64_t lower;   // from a row of the upper tile to one of the lower
  const uint16_t *tile;
  int32_t num_steps;
  bool is_first;     // chunk of the tile
  float *sums;
  const char *next;  // of the weight: what is asked for
};

inline void begin_sums(const Pass &pass) {
  if (pass.is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, pass.sums, 64);
  _tile_loadd(1, pass.sums + kTileSums, 64);
  _tile_loadd(2, pass.sums + 2 * kTileSums, 64);
  _tile_loadd(3, pass.sums + 3 * kTileSums, 64);
}

inline void keep_sums(const Pass &pass) {
  _tile_stored(0, pass.sums, 64);
  _tile_stored(1, pass.sums + kTileSums, 64);
  _tile_stored(2, pass.sums + 2 * kTileSums, 64);
  _tile_stored(3, pass.sums + 3 * kTileSums, 64);
  asm volatile("" ::: "memory");  // the compiler does not see what tiles write
}

// Inputs pass through level 1 without staying there: what the hint of the streaming load is for.
inline void add_step(const uint16_t *inputs, int64_t stride, int64_t lower, const uint16_t *tile) {
  _tile_stream_loadd(4, inputs, stride * 2);
  _tile_loadd(6, tile, kTileOutputs * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, tile + 32, kTileOutputs * 4);
  _tile_dpbf16ps(1, 4, 7);
  _tile_stream_loadd(5, inputs + lower, stride * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Multiplies; in each step asks for kAsked lines of what comes next, and writes kPut rows of sums that
// were finished before. No branch depends on numbers that change: one that is guessed wrongly costs
// as much as fifteen products, since all tiles under way are thrown away.
template <int kAsked, int kPut>
void run(const Pass &pass, const Sums &finished, int64_t stride) {
  begin_sums(pass);
  const uint16_t *inputs = pass.inputs, *tile = pass.tile;
  const char *next = pass.next;
  for (int32_t step = 0; step < pass.num_steps; ++step) {
    add_step(inputs, pass.stride, pass.lower, tile);
    inputs += kStepInputs;
    tile += kStepInputs * kTileOutputs;
#pragma GCC unroll 32
    for (int line = 0; line < kAsked; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    next += kAsked * 64;
#pragma GCC unroll 2
    for (int row = 0; row < kPut; ++row) put(finished, kPut * step + row, stride);
  }
  keep_sums(pass);
}

using Run = void (*)(const Pass &, const Sums &, int64_t);

struct Runs {
  int32_t num_asked;
  Run plain, putting;
};

template <int kAsked>
constexpr Runs runs() {
  return {kAsked, run<kAsked, 0>, run<kAsked, kPutRows>};
}

// All lines of the next chunk, shared out among the strips of a block.
Runs runs_for(int64_t num_strips) {
  constexpr Runs all[] = {runs<2>(), runs<3>(), runs<4>(), runs<5>(), runs<6>(), runs<8>(),
                          runs<11>(), runs<16>(), runs<32>()};
  const int64_t wanted = (kStepLines + num_strips - 1) / num_strips;
  for (const Runs &some : all)
    if (some.num_asked >= wanted) return some;
  return all[8];
}

// Rows of a block, and the part of the weight that they are multiplied with.
class Block {
 public:
  Block(const ost_product &p, int64_t first_strip, int64_t num_strips)
      : p_(p), first_row_(static_cast<int32_t>(first_strip * kStripRows)), num_strips_(num_strips),
        num_steps_(p.num_inputs / kStepInputs),
        num_chunks_((num_steps_ + kChunkSteps - 1) / kChunkSteps),
        runs_(runs_for(num_strips)),
        sums_(static_cast<float *>(thread_scratch(num_strips * kStripSums * 4))),
        rest_(p.num_rows % kStripRows) {
    has_rest_ = rest_rows() > 0 && first_row_ + num_strips * kStripRows > p.num_rows;
  }

  void multiply(int64_t first_tile, int64_t last_tile) {
    _tile_loadconfig(&all_);
    for (int64_t tile = first_tile; tile < last_tile; ++tile)
      for (int32_t chunk = 0; chunk < num_chunks_; ++chunk)
        for (int64_t strip = 0; strip < num_strips_; ++strip) go(tile, chunk, strip);
    put_from(0);
    _tile_release();
  }

 private:
  int32_t rest_rows() const { return p_.num_rows % kStripRows; }

  void go(int64_t tile, int32_t chunk, int64_t strip) {
    const int32_t begin = num_steps_ * chunk / num_chunks_;
    const int32_t end = num_steps_ * (chunk + 1) / num_chunks_;
    const int32_t row = first_row_ + static_cast<int32_t>(strip) * kStripRows;
    const bool is_rest = has_rest_ && strip + 1 == num_strips_;
    const int32_t num_rows = is_rest ? rest_rows() : kStripRows;
    const int64_t chunk_size = int64_t{end - begin} * kStepInputs * kTileOutputs;
    Pass pass;
    pass.inputs = static_cast<const uint16_t *>(p_.inputs.data) + row * p_.inputs.stride +
                  begin * kStepInputs;
    pass.stride = p_.inputs.stride;
    pass.lower = num_rows > kTileRows ? kTileRows * p_.inputs.stride : 0;
    pass.tile = static_cast<const uint16_t *>(p_.tiles) + tile * kTileOutputs * p_.num_inputs +
                int64_t{begin} * kStepInputs * kTileOutputs;
    pass.num_steps = end - begin;
    pass.is_first = chunk == 0;
    pass.sums = sums_ + strip * kStripSums;
    pass.next = reinterpret_cast<const char *>(pass.tile + chunk_size) +
                strip * pass.num_steps * runs_.num_asked * 64;
    if (is_rest) _tile_loadconfig(&rest_);
    const bool puts = finished_.num_rows == kStripRows;
    (puts ? runs_.putting : runs_.plain)(pass, finished_, p_.outputs.stride);
    if (is_rest) _tile_loadconfig(&all_);
    put_from(puts ? kPutRows * pass.num_steps : 0);
    if (chunk + 1 == num_chunks_) finish(pass, tile, row, num_rows);
  }

  // The rows of finished sums that no run has written.
  void put_from(int32_t row) {
    for (; row < finished_.num_rows; ++row) put(finished_, row, p_.outputs.stride);
    finished_.num_rows = 0;
  }

  void finish(const Pass &pass, int64_t tile, int32_t row, int32_t num_rows) {
    const auto *bias = static_cast<const uint16_t *>(p_.bias);
    finished_.numbers = pass.sums;
    finished_.outputs = static_cast<uint16_t *>(p_.outputs.data) + row * p_.outputs.stride +
                        tile * kTileOutputs;
    finished_.bias = bias == nullptr ? kNoBias : bias + tile * kTileOutputs;
    finished_.num_rows = num_rows;
  }

  const ost_product &p_;
  const int32_t first_row_;
  const int64_t num_strips_;
  const int32_t num_steps_, num_chunks_;
  const Runs runs_;
  float *const sums_;
  const Shapes all_{kStripRows}, rest_;
  bool has_rest_;
  Sums finished_;
};

}  // namespace

int64_t units_of_many(const ost_product &product) {
  const int64_t per_block = strips_per_block(product);
  const int64_t num_blocks = (strips_of(product) + per_block - 1) / per_block;
  return num_blocks * (product.num_outputs / kTileOutputs);
}

void product_amx_many(const ost_product &product, int64_t first, int64_t last) {
  const int64_t per_block = strips_per_block(product), num_tiles = product.num_outputs / kTileOutputs;
  while (first < last) {
    const int64_t block = first / num_tiles, end = std::min(last, (block + 1) * num_tiles);
    const int64_t strip = block * per_block;
    Block rows(product, strip, std::min(per_block, strips_of(product) - strip));
    rows.multiply(first - block * num_tiles, end - block * num_tiles);
    first = end;
  }
}

}  // namespace ost
