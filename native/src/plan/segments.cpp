// The segments of each item, which are the runs of keys that its rows see, and their cost.
//
// A span is a run that several sequences share, or what a sequence sees besides; cut to the items whose
// rows see it, and to their windows, it becomes segments. Each block is named once, in its span.
#include <algorithm>

#include "plan/plan.h"

namespace ost {
namespace {

int32_t blocks_of(int32_t num_keys, int32_t block_size) {
  return (num_keys + block_size - 1) / block_size;
}

void name_blocks(Planning &p, const int64_t *table, int32_t first_column, int32_t stop_column) {
  for (int32_t column = first_column; column < stop_column; ++column)
    p.blocks.push_back(static_cast<int32_t>(table[column]));
}

void find_spans(Planning &p) {
  const int32_t size = p.step->block_size;
  p.blocks.clear();
  p.spans.clear();
  for (const Run &run : p.runs) {
    int32_t lowest = INT32_MAX;
    for (int32_t place = run.low; place < run.high; ++place)
      lowest = std::min(lowest, p.sequences[p.order[place]].first_position);
    p.spans.push_back({p.place_starts[run.low], p.place_starts[run.high], run.first_column * size,
                       run.stop_column * size, lowest, static_cast<int64_t>(p.blocks.size()),
                       false});
    name_blocks(p, p.sequences[p.order[run.low]].table, run.first_column, run.stop_column);
  }
  for (size_t place = 0; place < p.order.size(); ++place) {
    const Sequence &s = p.sequences[p.order[place]];
    p.spans.push_back({p.place_starts[place], p.place_starts[place + 1], p.columns[place] * size,
                       s.end(), s.first_position, static_cast<int64_t>(p.blocks.size()), true});
    name_blocks(p, s.table, p.columns[place], blocks_of(s.end(), size));
  }
}

// The part of a span that the rows from..to - 1 of an item see; without keys if there is none.
ost_segment cut_span(const Planning &p, const Span &span, int32_t from, int32_t to) {
  const int32_t size = p.step->block_size, window = p.rules->window;
  const int32_t unit = p.run_columns * size;
  const int32_t first_row = std::max(from, span.first_row), last_row = std::min(to, span.last_row);
  const int32_t end = span.is_tail ? p.positions[last_row - 1] + 1 : span.last_position;
  int32_t begin = span.first_position;
  if (window > 0) {
    const int32_t lowest = span.is_tail ? p.positions[first_row] : span.lowest;
    const int32_t first_seen = lowest - window + 1;
    if (first_seen > begin) begin = first_seen / unit * unit;
  }
  const int64_t entry = span.first_entry + (begin - span.first_position) / size;
  return {entry, first_row, last_row, begin, std::max(0, end - begin)};
}

double cost_of(const Planning &p, const ost_segment &s) {
  const double num_rows = static_cast<double>(s.last_row - s.first_row) * p.rules->group;
  return s.num_keys * (1 + p.rules->row_cost * num_rows);
}

}  // namespace

void cut_segments(Planning &planning) {
  Planning &p = planning;
  find_spans(p);
  p.segments.clear();
  p.items.clear();
  p.costs.clear();
  // Runs are few; of the tails, an item sees those of its own places.
  const size_t num_runs = p.runs.size(), num_places = p.order.size();
  size_t place = 0;
  for (size_t i = 0; i + 1 < p.item_starts.size(); ++i) {
    const int32_t from = p.item_starts[i], to = p.item_starts[i + 1];
    const int32_t first_segment = static_cast<int32_t>(p.segments.size());
    const auto see = [&](const Span &span) {
      const ost_segment segment = cut_span(p, span, from, to);
      if (segment.num_keys == 0) return;
      p.segments.push_back(segment);
      p.costs.push_back(cost_of(p, segment));
    };
    for (size_t n = 0; n < num_runs; ++n)
      if (p.spans[n].first_row < to && p.spans[n].last_row > from) see(p.spans[n]);
    while (p.place_starts[place + 1] <= from) ++place;
    for (size_t at = place; at < num_places && p.place_starts[at] < to; ++at)
      see(p.spans[num_runs + at]);
    p.items.push_back({from, to, first_segment, static_cast<int32_t>(p.segments.size()), 0,
                       INT32_MAX, -1});
  }
}

}  // namespace ost
