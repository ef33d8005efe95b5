// The order of rows, and the positions at which they are cut into items.
//
// Rows stand in the order of the tree, each sequence's own keys behind the runs that it shares:
//
//   tables           rows   runs of keys
//   A  s y d o P      0     ┐ s y    ┐ d o    P
//   B  s y d o Q      1     │        ┘        Q
//   C  s y R          2     ┘                 R
//   D  T U            3                       T U
//
// Neighbours that share nothing are different items, and those that share are one, unless they are too
// many for a core's cache: then they are cut where they share least. A chunk of a prompt is cut into
// pieces that keep a core busy by themselves, and shares nothing: its products dwarf what it reads.
#include <algorithm>
#include <cmath>

#include "plan/plan.h"

namespace ost {
namespace {

void lay_rows(Planning &p) {
  p.place_starts.assign(1, 0);
  p.tokens.clear();
  p.positions.clear();
  for (const int32_t sequence : p.order) {
    const Sequence &s = p.sequences[sequence];
    for (int32_t i = 0; i < s.num_rows; ++i) {
      p.tokens.push_back(s.first_row + i);
      p.positions.push_back(s.first_position + i);
    }
    p.place_starts.push_back(p.place_starts.back() + s.num_rows);
  }
}

void note_sharing(Planning &p) {
  p.shared.assign(p.order.size(), 0);
  p.columns.assign(p.order.size(), 0);
  for (const Run &run : p.runs) {  // those below come later, and reach further
    std::fill(p.columns.begin() + run.low, p.columns.begin() + run.high, run.stop_column);
    std::fill(p.shared.begin() + run.low, p.shared.begin() + run.high - 1, run.stop_column);
  }
}

// Of the bounds between places first..last - 1, the one to cut at: near, and where little is shared.
int32_t best_cut(const Planning &p, int32_t first, int32_t last) {
  const int32_t begin = p.place_starts[first], num_rows = p.place_starts[last] - begin;
  const int32_t num_items = (num_rows + p.max_rows - 1) / p.max_rows;
  const double even = begin + static_cast<double>(num_rows) / num_items;
  int32_t best = -1;
  for (int32_t place = first + 1; place < last; ++place) {
    const int32_t bound = p.place_starts[place];
    if (bound < even - p.max_rows / 2) continue;
    if (bound > begin + p.max_rows) break;
    const int32_t shares = p.shared[place - 1], best_shares = best < 0 ? 0 : p.shared[best - 1];
    const bool is_nearer =
        best >= 0 && std::abs(bound - even) < std::abs(p.place_starts[best] - even);
    if (best < 0 || shares < best_shares || (shares == best_shares && is_nearer)) best = place;
  }
  return best;
}

void cut_family(Planning &p, int32_t first, int32_t last) {
  while (p.place_starts[last] - p.place_starts[first] > p.max_rows) {
    first = best_cut(p, first, last);
    p.item_starts.push_back(p.place_starts[first]);
  }
  p.item_starts.push_back(p.place_starts[last]);
}

void cut_chunk(Planning &p, int32_t place) {
  const int64_t begin = p.place_starts[place], num_rows = p.place_starts[place + 1] - begin;
  const int64_t num_pieces = (num_rows + p.max_rows - 1) / p.max_rows;
  for (int64_t piece = 1; piece <= num_pieces; ++piece)
    p.item_starts.push_back(static_cast<int32_t>(begin + num_rows * piece / num_pieces));
}

}  // namespace

void order_rows(Planning &planning) {
  Planning &p = planning;
  lay_rows(p);
  note_sharing(p);
  p.item_starts.assign(1, 0);
  const int32_t num = static_cast<int32_t>(p.order.size());
  for (int32_t first = 0, last; first < num; first = last) {
    for (last = first + 1; last < num && p.shared[last - 1] > 0;) ++last;
    if (p.sequences[p.order[first]].is_chunk)
      cut_chunk(p, first);
    else
      cut_family(p, first, last);
  }
}

}  // namespace ost
