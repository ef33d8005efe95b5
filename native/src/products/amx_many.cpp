// AMX products of many rows: the tile unit never waits for memory.
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
#include <cstring>

#include "products/finish.h"
#include "threads/scratch.h"

namespace ost {

namespace {

using tiles::kTileRows;
using tiles::Shapes;

constexpr int32_t kStepInputs = 32;         // what one product of tiles takes
constexpr int32_t kStepLines = 32;          // of the weight, for 32 inputs
constexpr int32_t kChunkSteps = 16;         // 32 KiB of the weight
constexpr int64_t kBlockBytes = 1 << 20;    // of rows, in a level 2 cache of 2 MiB
constexpr int64_t kFewestStrips = 4;        // of a block: below, weights pass by too often
constexpr int64_t kMaxStrips = 16;         // whose sums are in level 2 as well
constexpr int32_t kPutRows = kStripRows / kChunkSteps;  // in each step, until all are written

int64_t strips_of(const ost_product &p) { return (p.num_rows + kStripRows - 1) / kStripRows; }

// Blocks are equally large, up to a strip.
int64_t strips_per_block(const ost_product &p) {
  const int64_t fitting = kBlockBytes / (int64_t{kStripRows} * p.num_inputs * 2);
  const int64_t max_strips = std::max(kFewestStrips, std::min(kMaxStrips, fitting));
  const int64_t num_blocks = (strips_of(p) + max_strips - 1) / max_strips;
  return (strips_of(p) + num_blocks - 1) / num_blocks;
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

// Multiplies; in each step asks for kPrefetchedLines lines of what comes next, and puts two rows of the sums that
// were finished before. No branch depends on numbers that change: one that is guessed wrongly costs
// as much as fifteen products, since all tiles under way are thrown away.
template <int kPrefetchedLines, Finish kFinish>
void run(const Pass &pass, const Sums &before) {
  begin_sums(pass);
  const uint16_t *inputs = pass.inputs, *tile = pass.tile;
  const char *next = pass.next;
  for (int32_t step = 0; step < pass.num_steps; ++step) {
    add_step(inputs, pass.stride, pass.lower, tile);
    inputs += kStepInputs;
    tile += kStepInputs * kTileOutputs;
#pragma GCC unroll 32
    for (int line = 0; line < kPrefetchedLines; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    next += kPrefetchedLines * 64;
    if constexpr (kFinish != Finish::kNothing) {
      put<kFinish>(before, kPutRows * step);
      put<kFinish>(before, kPutRows * step + 1);
    }
  }
  keep_sums(pass);
}

using Run = void (*)(const Pass &, const Sums &);

struct Runs {
  int32_t num_prefetched;
  Run of[5];  // by how sums are finished
};

template <int kPrefetchedLines>
constexpr Runs runs() {
  return {kPrefetchedLines,
          {run<kPrefetchedLines, Finish::kNothing>, run<kPrefetchedLines, Finish::kWrite>, run<kPrefetchedLines, Finish::kOpen>,
           run<kPrefetchedLines, Finish::kGelu>, run<kPrefetchedLines, Finish::kThrough>}};
}

// All lines of the next chunk, shared out among the strips of a block.
const Runs &runs_for(int64_t num_strips) {
  static constexpr Runs all[] = {runs<2>(), runs<3>(), runs<4>(), runs<6>(),
                                 runs<8>(), runs<16>(), runs<32>()};
  const int64_t num_lines = (kStepLines + num_strips - 1) / num_strips;
  return *std::find_if(all, all + 6, [&](const Runs &runs) { return runs.num_prefetched >= num_lines; });
}

void put_rows(const Sums &sums, int32_t first) {
  for (int32_t row = first; row < sums.num_rows; ++row) {
    if (sums.finish == Finish::kWrite) put<Finish::kWrite>(sums, row);
    if (sums.finish == Finish::kOpen) put<Finish::kOpen>(sums, row);
    if (sums.finish == Finish::kGelu) put<Finish::kGelu>(sums, row);
    if (sums.finish == Finish::kThrough) put<Finish::kThrough>(sums, row);
  }
}

// Rows of a block, and what they are multiplied with.
class Block {
 public:
  Block(const ost_product &p, int64_t first_strip, int64_t num_strips)
      : p_(p), first_row_(static_cast<int32_t>(first_strip * kStripRows)), num_strips_(num_strips),
        num_steps_(p.num_inputs / kStepInputs),
        num_chunks_((num_steps_ + kChunkSteps - 1) / kChunkSteps), runs_(runs_for(num_strips)),
        rest_(p.num_rows % kStripRows) {
    sums_ = static_cast<float *>(
        thread_scratch(num_strips * (kStripSums * 4 + kStripRows * kTileOutputs * 2)));
    gates_ = reinterpret_cast<uint16_t *>(sums_ + num_strips * kStripSums);
    has_rest_ = rest_rows() > 0 && first_row_ + num_strips * kStripRows > p.num_rows;
    _tile_loadconfig(&all_);
  }

  ~Block() {
    put_rows(before_, 0);
    _tile_release();
    _mm_sfence();  // what went past the cache is there before anybody is told that it is
  }

  // Sums of a tile, to be finished somehow; next is the tile after it.
  void add_tile(int64_t tile, int64_t next, Finish finish, const ost_matrix &outputs,
                int64_t column) {
    for (int32_t chunk = 0; chunk < num_chunks_; ++chunk) {
      const bool is_last = chunk + 1 == num_chunks_;
      const uint16_t *after = is_last ? chunk_of(next, 0) : chunk_of(tile, chunk + 1);
      for (int64_t strip = 0; strip < num_strips_; ++strip) {
        add_strip(tile, chunk, strip, reinterpret_cast<const char *>(after));
        if (is_last) finish_strip(tile, strip, finish, outputs, column);
      }
    }
  }

 private:
  int32_t rest_rows() const { return p_.num_rows % kStripRows; }
  int32_t row_of(int64_t strip) const {
    return first_row_ + static_cast<int32_t>(strip) * kStripRows;
  }
  int32_t rows_of(int64_t strip) const {
    return has_rest_ && strip + 1 == num_strips_ ? rest_rows() : kStripRows;
  }
  int32_t first_step(int32_t chunk) const { return num_steps_ * chunk / num_chunks_; }
  const uint16_t *chunk_of(int64_t tile, int32_t chunk) const {
    return static_cast<const uint16_t *>(p_.tiles) + tile * kTileOutputs * p_.num_inputs +
           int64_t{first_step(chunk)} * kStepInputs * kTileOutputs;
  }

  void add_strip(int64_t tile, int32_t chunk, int64_t strip, const char *after) {
    const bool is_rest = rows_of(strip) < kStripRows;
    Pass pass;
    pass.num_steps = first_step(chunk + 1) - first_step(chunk);
    pass.inputs = static_cast<const uint16_t *>(p_.inputs.data) +
                  row_of(strip) * p_.inputs.stride + first_step(chunk) * kStepInputs;
    pass.stride = p_.inputs.stride;
    pass.lower = rows_of(strip) > kTileRows ? kTileRows * p_.inputs.stride : 0;
    pass.tile = chunk_of(tile, chunk);
    pass.is_first = chunk == 0;
    pass.sums = sums_ + strip * kStripSums;
    pass.next = after + strip * pass.num_steps * runs_.num_prefetched * 64;
    // Sums of all rows are put meanwhile, as far as there are steps; but where a block has one strip,
    // they lie where those of the next tile will.
    const bool puts = before_.num_rows == kStripRows && num_strips_ > 1;
    if (!puts) put_rows(before_, 0);
    if (is_rest) _tile_loadconfig(&rest_);
    runs_.of[puts ? static_cast<int>(before_.finish) : 0](pass, before_);
    if (is_rest) _tile_loadconfig(&all_);
    if (puts) put_rows(before_, kPutRows * pass.num_steps);
    before_.num_rows = 0;
  }

  void finish_strip(int64_t tile, int64_t strip, Finish finish, const ost_matrix &outputs,
                    int64_t column) {
    uint16_t *const gates = gates_ + strip * kStripRows * kTileOutputs;
    before_.finish = finish;
    before_.num_rows = rows_of(strip);
    before_.numbers = sums_ + strip * kStripSums;
    before_.width = std::min(kTileOutputs, p_.num_outputs - static_cast<int32_t>(tile) * kTileOutputs);
    if (p_.bias != nullptr && strip == 0)
      std::memcpy(before_.bias, static_cast<const uint16_t *>(p_.bias) + tile * kTileOutputs,
                  static_cast<size_t>(before_.width) * sizeof *before_.bias);
    before_.outputs = static_cast<uint16_t *>(outputs.data) + row_of(strip) * outputs.stride + column;
    before_.stride = outputs.stride;
    before_.are_lines = before_.width == kTileOutputs &&
                        reinterpret_cast<uintptr_t>(before_.outputs) % 64 == 0 &&
                        before_.stride % kTileOutputs == 0;
    before_.gates = gates;
    if (finish == Finish::kOpen || finish == Finish::kGelu) {
      before_.outputs = gates;
      before_.stride = kTileOutputs;
    }
  }

  const ost_product &p_;
  const int32_t first_row_;
  const int64_t num_strips_;
  const int32_t num_steps_, num_chunks_;
  const Runs &runs_;
  const Shapes all_{kStripRows}, rest_;
  bool has_rest_;
  float *sums_;      // of each strip
  uint16_t *gates_;  // (num_strips, 32, 32)
  Sums before_;
};

// Calls compute(block, first, last) for the units of each block among first .. last - 1.
template <class Compute>
void each_block(const ost_product &p, int64_t per_block, int64_t first, int64_t last,
                Compute compute) {
  const int64_t strips = strips_per_block(p);
  while (first < last) {
    const int64_t index = first / per_block, begin = index * per_block;
    const int64_t end = std::min(last, begin + per_block);
    Block block(p, index * strips, std::min(strips, strips_of(p) - index * strips));
    compute(block, first - begin, end - begin);
    first = end;
  }
}

}  // namespace

int64_t blocks_of_many(const ost_product &product) {
  const int64_t per_block = strips_per_block(product);
  return (strips_of(product) + per_block - 1) / per_block;
}

void product_amx_many(const ost_product &product, int64_t first, int64_t last) {
  const int64_t per_block = num_tiles(product.num_outputs);
  each_block(product, per_block, first, last, [&](Block &block, int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      block.add_tile(tile, tile + 1, Finish::kWrite, product.outputs, tile * kTileOutputs);
  });
}

void product_gated_amx(const ost_gated_product &op, int64_t first, int64_t last) {
  const ost_product &p = op.product;
  const int64_t num_pairs = p.num_outputs / kTileOutputs / 2;
  const Finish open = op.gated.activation == OST_SILU ? Finish::kOpen : Finish::kGelu;
  each_block(p, num_pairs, first, last, [&](Block &block, int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      block.add_tile(tile, num_pairs + tile, open, op.gated.output, 0);
      block.add_tile(num_pairs + tile, tile + 1, Finish::kThrough, op.gated.output,
                     tile * kTileOutputs);
    }
  });
}

}  // namespace ost
