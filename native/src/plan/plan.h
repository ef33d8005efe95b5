// Values that one phase of planning passes to the next, in the order of the phases:
//
//   checks ─► sequences ─► tables, windows filled in ─► tree: order and runs ─► rows: items ─► segments
//                                                       ─► parts: cut by keys, packed, dearest first
#pragma once

#include <cstdint>
#include <vector>

#include "ostinato_plan.h"

namespace ost {

// A sequence of the step; rows are counted as the step has them.
struct Sequence {
  const int64_t *table;
  int32_t first_row, num_rows, first_position;
  int32_t past;  // blocks at the head of its table whose tokens all lie before its first row
  bool is_chunk; // so many rows that reading does not matter
  int32_t end() const { return first_position + num_rows; }
};

// Neighbouring blocks that the sequences at places low..high - 1 hold at the same columns.
struct Run {
  int32_t low, high, first_column, stop_column;
};

// Keys, and the rows of the plan that see them; tails end with their sequence's own rows.
struct Span {
  int32_t first_row, last_row, first_position, last_position, lowest;
  int64_t first_entry;
  bool is_tail;
};

// What is kept from one step to the next is room alone: everything is worked out anew.
struct Planning {
  const ost_step *step;
  const ost_rules *rules;
  int32_t max_rows;    // of an item
  int32_t run_columns;  // runs are multiples of this

  std::vector<Sequence> sequences;
  std::vector<int64_t> filled;        // tables with what windows left, where any did
  std::vector<int32_t> order;         // sequences by place
  std::vector<Run> runs;              // each before those below it
  std::vector<int32_t> place_starts;  // first row of each place, and the end
  std::vector<int32_t> shared;        // columns that a place shares with the next
  std::vector<int32_t> columns;       // that runs cover of a place's table
  std::vector<int32_t> item_starts;   // first row of each item, and the end
  std::vector<Span> spans;
  std::vector<double> costs;          // of each segment, for one head of keys

  std::vector<int32_t> tokens, positions, blocks, merge_rows, merge_starts, merge_partials;
  std::vector<ost_segment> segments;
  std::vector<ost_item> items;
  int32_t num_partials;
};

// Returns the number of the first fault of a step, or 0.
int64_t find_fault(const ost_step &step);
void fill_windows(Planning &planning);
void find_runs(Planning &planning);
void order_rows(Planning &planning);
void cut_segments(Planning &planning);
void cut_parts(Planning &planning);

}  // namespace ost
