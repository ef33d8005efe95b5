// The tree of shared prefixes: runs of blocks that several sequences of a step have in common.
//
// Block tables that begin alike form a tree; each edge of it is a run, and sequences are laid in
// depth-first order, so that all that share a run are neighbours:
//
//   tables           runs                      read privately
//   A  0 1 2 3 7     [0 1] by A B C D          A  7
//   B  0 1 2 3 8     └─ [2 3] by A B           B  8
//   C  0 1 4 9                                 C  4 9
//   D  0 1 5                                   D  5
//
// Only blocks whose tokens all lie before a sequence's first row count, so every row sees every key
// of a run. An edge that is not worth a reading of its own leaves its blocks to the edges below it,
// and at last to the sequences. Which blocks those are makes no difference to the order: members go by
// their places in the step.
//
// Cost: each table is compared once with one that begins alike, some 32 bytes in a nanosecond.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan/plan.h"

namespace ost {
namespace {

constexpr int32_t kAtOnce = 64;  // entries compared at once

// How many columns from `column` to `stop` two tables have in common, counted from 0.
int32_t common(const int64_t *one, const int64_t *other, int32_t column, int32_t stop) {
  while (column + kAtOnce <= stop &&
         std::memcmp(one + column, other + column, kAtOnce * sizeof(int64_t)) == 0)
    column += kAtOnce;
  while (column < stop && one[column] == other[column]) ++column;
  return column;
}

class Tree {
 public:
  explicit Tree(Planning &planning) : p_(planning) {}

  void grow() {
    const int32_t num = static_cast<int32_t>(p_.sequences.size());
    p_.order.clear();
    p_.runs.clear();
    for (int32_t i = 0; i < num; ++i)
      if (!p_.sequences[i].is_chunk) p_.order.push_back(i);
    const int32_t num_sharing = static_cast<int32_t>(p_.order.size());
    for (int32_t i = 0; i < num; ++i)
      if (p_.sequences[i].is_chunk) p_.order.push_back(i);
    if (!std::isinf(p_.rules->keys_per_run)) branch(0, num_sharing, 0, 0);
  }

 private:
  // A sequence, the block that it goes on with, and the first that goes on likewise.
  struct Branch {
    int64_t block;
    int32_t first, sequence;
  };

  // Puts those who go on alike side by side, and follows each that are several.
  void branch(int32_t low, int32_t high, int32_t column, int32_t uncovered) {
    gather(low, high, column);
    std::vector<std::pair<int32_t, int32_t>> children;
    for (int32_t from = 0, to; from < high - low; from = to) {
      for (to = from + 1; to < high - low && branches_[to].first == branches_[from].first;) ++to;
      if (to - from > 1) children.emplace_back(low + from, low + to);
    }
    for (const auto &[from, to] : children) follow(from, to, column, uncovered);
  }

  void gather(int32_t low, int32_t high, int32_t column) {
    branches_.clear();
    for (int32_t place = low; place < high; ++place) {
      const int32_t sequence = p_.order[place];
      const Sequence &s = p_.sequences[sequence];
      // Whoever ends here goes on alone.
      const int64_t block = s.past > column ? s.table[column] : -1 - int64_t{sequence};
      branches_.push_back({block, sequence, sequence});
    }
    const auto by_block = [](const Branch &a, const Branch &b) {
      return a.block != b.block ? a.block < b.block : a.sequence < b.sequence;
    };
    const auto by_first = [](const Branch &a, const Branch &b) {
      return a.first != b.first ? a.first < b.first : a.sequence < b.sequence;
    };
    std::sort(branches_.begin(), branches_.end(), by_block);
    for (size_t i = 1; i < branches_.size(); ++i)
      if (branches_[i].block == branches_[i - 1].block) branches_[i].first = branches_[i - 1].first;
    std::sort(branches_.begin(), branches_.end(), by_first);
    for (int32_t place = low; place < high; ++place)
      p_.order[place] = branches_[place - low].sequence;
  }

  // Members share what lies before `column`, and the block there; runs cover up to `uncovered`.
  void follow(int32_t low, int32_t high, int32_t column, int32_t uncovered) {
    int32_t stop = INT32_MAX, lowest = INT32_MAX;
    int64_t num_rows = 0;
    for (int32_t place = low; place < high; ++place) {
      const Sequence &s = p_.sequences[p_.order[place]];
      stop = std::min(stop, s.past);
      lowest = std::min(lowest, s.first_position);
      num_rows += s.num_rows;
    }
    const int64_t *const table = p_.sequences[p_.order[low]].table;
    for (int32_t place = low + 1; place < high; ++place)
      stop = common(table, p_.sequences[p_.order[place]].table, column + 1, stop);
    const int32_t size = p_.step->block_size, seen = first_seen(lowest);
    const int32_t whole = stop / p_.run_columns * p_.run_columns;
    if (is_worth(whole * size - std::max(uncovered * size, seen), high - low, num_rows)) {
      p_.runs.push_back({low, high, uncovered, whole});
      uncovered = whole;
    }
    branch(low, high, stop, uncovered);
  }

  // The first position that a row sees.
  int32_t first_seen(int32_t row) const {
    return p_.rules->window > 0 ? std::max(0, row - p_.rules->window + 1) : 0;
  }

  // Whether reading once saves more keys than it costs.
  bool is_worth(int64_t num_keys, int64_t num_sequences, int64_t num_rows) const {
    const ost_rules &rules = *p_.rules;
    const int64_t saved = num_keys * (num_sequences - 1);
    const double rows = static_cast<double>(num_rows * rules.group);
    return static_cast<double>(saved) > rules.keys_per_run + rules.keys_per_row * rows;
  }

  Planning &p_;
  std::vector<Branch> branches_;
};

}  // namespace

void find_runs(Planning &planning) { Tree(planning).grow(); }

}  // namespace ost
