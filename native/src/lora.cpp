// See lora.h.
#include "lora.h"

#include <algorithm>
#include <cstring>

#include "simd/formats.h"
#include "ops/kernels.h"
#include "threads/scratch.h"
#include "weights/tiles.h"

namespace ost {

namespace {

constexpr int64_t kBlockRows = 48;
constexpr int64_t kUpTiles = 8;  // of 32 outputs, that a unit adds to: its rows stay in the cache
// Rows that are read again at once are no multiple of a line apart: else AMX would write them past
// the cache.
constexpr int64_t kApart = 8;
constexpr int64_t kScratchStride = kUpTiles * kTileOutputs + kApart;

int64_t padded_rank(const ost_lora_part &part) { return round_up(part.rank, kInputsPerStep); }

int64_t num_down(const ost_lora_part &part) { return num_tiles(part.rank); }

int64_t num_up(const ost_lora_part &part) {
  return (num_tiles(part.num_outputs) + kUpTiles - 1) / kUpTiles;
}

// The sum of something over the parts of a layer.
template <class Count>
int64_t total(const ost_lora_layer &layer, Count count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < layer.num_parts; ++i) sum += count(layer.parts[i]);
  return sum;
}

const void *tile_of(const void *tiles, int64_t tile, int64_t num_inputs, int64_t element_bytes) {
  return static_cast<const char *>(tiles) + tile * kTileOutputs * num_inputs * element_bytes;
}

char *row_of(const ost_matrix &matrix, int64_t row, int64_t element_bytes) {
  return static_cast<char *>(matrix.data) + row * matrix.stride * element_bytes;
}

void multiply(const ost_product &product) {
  const Work work = work_of(product);
  work.compute(work.record, 0, work.num_units);
}

// Sums of ranks that are other updates' become zero, so that a shared tile of up adds nothing of them.
void keep_own_ranks(const ost_lora_part &part, const ost_matrix &sums, int32_t num_rows, int64_t size) {
  const int64_t end = part.first_own + part.num_own;
  for (int32_t i = 0; i < num_rows; ++i) {
    char *const row = row_of(sums, i, size);
    std::memset(row, 0, static_cast<size_t>(part.first_own * size));
    std::memset(row + end * size, 0, static_cast<size_t>((kTileOutputs - end) * size));
  }
}

}  // namespace

LoraBlocks::LoraBlocks(const ost_lora &op) : op_(op) {
  for (int64_t i = 0; i < op.step->num_groups; ++i) {
    const ost_lora_group &group = op.step->groups[i];
    const ost_lora_layer &layer = group.layers[op.layer];
    const int64_t *const end =
        std::lower_bound(group.rows, group.rows + group.num_rows, op.first_row + op.num_rows);
    const int64_t *rows = std::lower_bound(group.rows, end, op.first_row);
    if (rows == end || layer.num_parts == 0) continue;
    while (rows < end) {
      const int64_t num_rows = std::min<int64_t>(kBlockRows, end - rows);
      blocks_.push_back({&layer, rows, static_cast<int32_t>(num_rows), num_sums_});
      rows += num_rows;
      num_sums_ += num_rows;
    }
    sums_stride_ = std::max(sums_stride_, total(layer, padded_rank) + kApart);
    max_down_ = std::max(max_down_, total(layer, num_down));
    max_up_ = std::max(max_up_, total(layer, num_up));
  }
}

int64_t LoraBlocks::sums_bytes() const { return num_sums_ * sums_stride_ * bytes_of(op_.dtype); }

Work LoraBlocks::down() const {
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit)
      static_cast<const LoraBlocks *>(of)->compute_down(unit);
  };
  return {this, compute, static_cast<int64_t>(blocks_.size()) * max_down_, 1};
}

Work LoraBlocks::up() const {
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit)
      static_cast<const LoraBlocks *>(of)->compute_up(unit);
  };
  return {this, compute, static_cast<int64_t>(blocks_.size()) * max_up_, 1};
}

// Blocks have as many units as the one with the most; false where this one has fewer.
bool LoraBlocks::find_piece(int64_t unit, int64_t per_block,
                            int64_t (*num_pieces)(const ost_lora_part &), Piece *piece) const {
  const Block &block = blocks_[static_cast<size_t>(unit / per_block)];
  int64_t index = unit % per_block, first_rank = 0;
  for (int64_t i = 0; i < block.layer->num_parts; ++i) {
    const ost_lora_part &part = block.layer->parts[i];
    if (index < num_pieces(part)) {
      *piece = {&block, &part, first_rank, index};
      return true;
    }
    index -= num_pieces(part);
    first_rank += padded_rank(part);
  }
  return false;
}

// 32 ranks of a block: what fills the last tile up becomes zero.
void LoraBlocks::compute_down(int64_t unit) const {
  Piece piece;
  if (!find_piece(unit, max_down_, num_down, &piece)) return;
  const int64_t size = bytes_of(op_.dtype);
  const int64_t num_inputs = round_up(op_.num_inputs, kInputsPerStep);
  ost_product own = product(tile_of(piece.part->down, piece.index, num_inputs, size), *piece.block);
  own.inputs = inputs_of(*piece.block);
  own.num_inputs = static_cast<int32_t>(num_inputs);
  own.outputs = sums_of(piece);
  own.outputs.data = row_of(own.outputs, 0, size) + piece.index * kTileOutputs * size;
  own.num_outputs = kTileOutputs;
  multiply(own);
  if (piece.part->num_own > 0) keep_own_ranks(*piece.part, own.outputs, own.num_rows, size);
}

// Some outputs of a block, which are added to what the base model's product left.
void LoraBlocks::compute_up(int64_t unit) const {
  Piece piece;
  if (!find_piece(unit, max_up_, num_up, &piece)) return;
  const ost_lora_part &part = *piece.part;
  const int64_t size = bytes_of(op_.dtype), first = piece.index * kUpTiles * kTileOutputs;
  const int64_t num_inputs = padded_rank(part);
  ost_product own =
      product(tile_of(part.up, piece.index * kUpTiles, num_inputs, size), *piece.block);
  own.inputs = sums_of(piece);
  own.num_inputs = static_cast<int32_t>(num_inputs);
  own.outputs = {rows_scratch(kBlockRows * kScratchStride * size), kScratchStride};
  own.num_outputs =
      static_cast<int32_t>(std::min(kUpTiles * kTileOutputs, part.num_outputs - first));
  multiply(own);
  for (int32_t i = 0; i < piece.block->num_rows; ++i) {
    char *const outputs = row_of(op_.outputs, piece.block->rows[i] - op_.first_row, size);
    ops_kernels().add_scaled(outputs + (part.first_output + first) * size,
                             row_of(own.outputs, i, size), own.num_outputs, part.scale, op_.dtype);
  }
}

// A block's rows, side by side: as they are where they are neighbours that products can read.
ost_matrix LoraBlocks::inputs_of(const Block &block) const {
  const int64_t size = bytes_of(op_.dtype), width = round_up(op_.num_inputs, kInputsPerStep);
  const int64_t first = block.rows[0] - op_.first_row;
  const bool are_neighbours = block.rows[block.num_rows - 1] - block.rows[0] == block.num_rows - 1;
  if (are_neighbours && width == op_.num_inputs)
    return {row_of(op_.inputs, first, size), op_.inputs.stride};
  const ost_matrix rows{rows_scratch(block.num_rows * (width + 32) * size), width + 32};
  for (int32_t i = 0; i < block.num_rows; ++i) {
    char *const to = row_of(rows, i, size);
    std::memcpy(to, row_of(op_.inputs, block.rows[i] - op_.first_row, size),
                static_cast<size_t>(op_.num_inputs * size));
    std::memset(to + op_.num_inputs * size, 0,
                static_cast<size_t>((width - op_.num_inputs) * size));
  }
  return rows;
}

ost_matrix LoraBlocks::sums_of(const Piece &piece) const {
  const int64_t first = piece.block->first_sum * sums_stride_ + piece.first_rank;
  return {sums_ + first * bytes_of(op_.dtype), sums_stride_};
}

ost_product LoraBlocks::product(const void *tiles, const Block &block) const {
  ost_product own{};
  own.tiles = tiles;
  own.num_rows = block.num_rows;
  own.dtype = op_.dtype;
  own.num_threads = 1;
  own.weight_format = OST_PLAIN;
  return own;
}

}  // namespace ost

extern "C" void ost_ops_lora(const ost_lora *op) {
  ost::LoraBlocks blocks(*op);
  blocks.keep_sums_in(ost::sums_scratch(blocks.sums_bytes()));
  const ost::Work works[] = {blocks.down(), blocks.up()};
  ost::run_works(works, 2, op->num_threads);
}
