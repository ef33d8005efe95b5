// Fills up block tables of sequences with windows, so that a run is shared by those that left part of it.
//
// A sequence gives back the blocks that left its window, and its table then holds the block that pads
// tables. Two sequences on one prefix, one of them a block further, would not begin alike any more:
//
//   A   . . b2 b3 b4 P         A sees from block 2 on, B from block 1 on
//   B   . b1 b2 b3 b4 Q        filled in: A  . b1 b2 b3 b4 P
//
// Whoever holds the same block at the same place has the same blocks before it, so the missing ones can
// be taken from B. A's rows look at none of them, since each row keeps to its own window; what is won
// is that b2 b3 b4 is one run. Sequences whose windows end far apart share too little for it.
#include <algorithm>
#include <map>

#include "plan/plan.h"

namespace ost {
namespace {

class Filling {
 public:
  explicit Filling(Planning &planning) : p_(planning) {}

  // Counts what tables lack at their beginning; returns whether that is anything.
  bool has_left() {
    for (const Sequence &s : p_.sequences) {
      const int32_t length = (s.end() + p_.step->block_size - 1) / p_.step->block_size;
      int32_t left = 0;
      while (left < length && s.table[left] == p_.step->num_blocks - 1) ++left;
      lengths_.push_back(length);
      num_freed_.push_back(left);
    }
    return std::any_of(num_freed_.begin(), num_freed_.end(), [](int32_t left) { return left > 0; });
  }

  // Fills tables in from those that still hold what they lack, the fullest first.
  void fill() {
    own_tables();
    std::vector<int32_t> order(num_freed_.size()), starts(num_freed_);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [this](int32_t a, int32_t b) { return num_freed_[a] < num_freed_[b]; });
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    const int32_t furthest = std::max(1, p_.rules->window / p_.step->block_size / 4);
    std::map<std::pair<int32_t, int64_t>, const int64_t *> holders;
    for (const int32_t i : order) {
      int64_t *const table = const_cast<int64_t *>(p_.sequences[i].table);
      const int32_t left = num_freed_[i], stop = std::min(left + furthest + 1, lengths_[i]);
      if (left < stop) {
        const auto holder = holders.find({left, table[left]});
        if (holder != holders.end()) std::copy(holder->second, holder->second + left, table);
      }
      for (const int32_t column : starts)
        if (left <= column && column < stop) holders.emplace(std::pair(column, table[column]), table);
    }
  }

 private:
  // Tables of the caller's stay as they are.
  void own_tables() {
    const ost_step &step = *p_.step;
    p_.filled.assign(step.blocks, step.blocks + step.table_starts[step.num_sequences]);
    for (int32_t i = 0; i < step.num_sequences; ++i)
      p_.sequences[i].table = p_.filled.data() + step.table_starts[i];
  }

  Planning &p_;
  std::vector<int32_t> lengths_, num_freed_;
};

}  // namespace

void fill_windows(Planning &planning) {
  if (planning.rules->window == 0) return;
  Filling filling(planning);
  if (filling.has_left()) filling.fill();
}

}  // namespace ost
