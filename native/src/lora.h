// Low-rank updates of adapters: the rows of each adapter go through its packed factors.
//
// The rows of an adapter, adjacent or not, are cut into blocks, and each block goes through both
// factors as through any packed weight, so that an adapter is read once for all its rows in a block:
//
//     block  (rows, inputs) x down  ─►  sums (rows, rank)  x up  ─►  scratch  * scale  ─►  += outputs
//            ───────────── first work ─────────────        ───────────── second work ──────────────
#pragma once

#include <cstdint>
#include <vector>

#include "threads/work.h"

namespace ost {

// The blocks of one operation, and the two works that they make.
class LoraBlocks {
 public:
  explicit LoraBlocks(const ost_lora &op);

  // Bytes for what the first work leaves to the second.
  int64_t sums_bytes() const;
  void keep_sums_in(void *sums) { sums_ = static_cast<char *>(sums); }

  Work down() const;
  Work up() const;

 private:
  struct Block {
    const ost_lora_layer *layer;
    const int64_t *rows;  // of the step
    int32_t num_rows;
    int64_t first_sum;  // its first row of sums
  };
  // A unit's part of a block, and the piece of the part's outputs that it computes.
  struct Piece {
    const Block *block;
    const ost_lora_part *part;
    int64_t first_rank;  // where the part's ranks begin in a row of sums
    int64_t index;
  };

  bool find_piece(int64_t unit, int64_t per_block, int64_t (*num_pieces)(const ost_lora_part &),
                  Piece *piece) const;
  void compute_down(int64_t unit) const;
  void compute_up(int64_t unit) const;
  ost_matrix inputs_of(const Block &block) const;
  ost_matrix sums_of(const Piece &piece) const;
  ost_product product(const void *tiles, const Block &block) const;

  ost_lora op_;
  std::vector<Block> blocks_;
  int64_t num_sums_ = 0, sums_stride_ = 0;
  int64_t max_down_ = 0, max_up_ = 0;  // units of a block
  char *sums_ = nullptr;
};

}  // namespace ost
