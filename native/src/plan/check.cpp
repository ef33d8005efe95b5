// Checks that a step's block tables cover what its sequences see, with valid blocks.
#include "plan/plan.h"

namespace ost {

int64_t find_fault(const ost_step &step) {
  if (step.num_sequences < 1 || step.starts[0] != 0) return OST_WRONG_ROWS;
  if (step.table_starts[0] < 0) return OST_WRONG_TABLES;
  for (int32_t i = 0; i < step.num_sequences; ++i) {
    const int64_t begin = step.starts[i], end = step.starts[i + 1];
    if (begin >= end || end > INT32_MAX) return OST_WRONG_ROWS;
    const int64_t first = step.first_positions[i];
    if (first < 0 || first > INT32_MAX - (end - begin)) return OST_WRONG_POSITIONS;
    const int64_t entry = step.table_starts[i], last_entry = step.table_starts[i + 1];
    if (entry > last_entry || last_entry > step.num_entries) return OST_WRONG_TABLES;
    if ((last_entry - entry) * step.block_size < first + end - begin) return OST_WRONG_TABLES;
  }
  uint64_t highest = 0;  // what is negative is high
  for (int64_t i = 0; i < step.num_entries; ++i) {
    const uint64_t block = static_cast<uint64_t>(step.blocks[i]);
    highest = block > highest ? block : highest;
  }
  return highest < static_cast<uint64_t>(step.num_blocks) ? 0 : OST_WRONG_BLOCKS;
}

}  // namespace ost
