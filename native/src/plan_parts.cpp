// Which items are cut by keys so that all threads have work, and which become one?
//
// One sequence of 100,000 tokens is one item; with two heads of keys and sixteen threads, fourteen
// would wait. Its keys are cut into parts of like cost at the boundaries of blocks, each part sees all
// of the item's rows that see its keys, and their results are merged (FlashDecoding's split, Dao et
// al. 2023):
//
//   segments of an item   ────────────── s y ──────────────┬─ P ─┬─ Q ─
//   parts                 ───── 0 ─────┼───── 1 ─────┼────── 2 ────────
//
// Many short items, on the other hand, cost more to begin than to compute: neighbours become one as
// long as all threads still have enough to do.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "plan.h"

namespace ost {
namespace {

double cost_of_item(const Planning &p, const ost_item &item) {
  return std::accumulate(p.costs.begin() + item.first_segment, p.costs.begin() + item.last_segment,
                         0.0);
}

// What a task may cost so that all threads find enough of them.
double most_cost(const Planning &p) {
  if (p.rules->num_threads == 1) return std::numeric_limits<double>::infinity();
  const double total = std::accumulate(p.costs.begin(), p.costs.end(), 0.0);
  const int64_t num_tasks = int64_t{p.rules->tasks_per_thread} * p.rules->num_threads;
  return total * p.rules->num_kv_heads / static_cast<double>(num_tasks);
}

// Lets neighbouring items become one while they cost no more than `most` together.
void pack(Planning &p, double most) {
  size_t num_items = 0;
  double cost = 0;
  for (const ost_item &item : p.items) {
    const double more = cost_of_item(p, item);
    if (num_items > 0) {
      ost_item &last = p.items[num_items - 1];
      if (cost + more <= most && item.last_row - last.first_row <= p.most_rows) {
        last.last_row = item.last_row;
        last.last_segment = item.last_segment;
        cost += more;
        continue;
      }
    }
    p.items[num_items++] = item;
    cost = more;
  }
  p.items.resize(num_items);
}

// Cuts items by keys; what comes out of it stands behind what was there.
class Cutter {
 public:
  explicit Cutter(Planning &planning) : p_(planning) {}

  void cut(const ost_item &item, int32_t num_parts) {
    const double total = cost_of_item(p_, item);
    for (int32_t part = 0; part < num_parts; ++part)
      add_part(item, total * part / num_parts,
               part + 1 < num_parts ? total * (part + 1) / num_parts
                                    : std::numeric_limits<double>::infinity());
  }

  // Says which partials belong together.
  void merge() {
    std::sort(seen_.begin(), seen_.end());
    for (const auto &[row, partial] : seen_) {
      if (p_.merge_rows.empty() || p_.merge_rows.back() != row) {
        p_.merge_rows.push_back(row);
        p_.merge_starts.push_back(static_cast<int32_t>(p_.merge_partials.size()));
      }
      p_.merge_partials.push_back(partial);
    }
    p_.merge_starts.push_back(static_cast<int32_t>(p_.merge_partials.size()));
  }

 private:
  // Keys of a segment that lie before a share of the item's cost; whole blocks, or all.
  int32_t keys_before(const ost_segment &s, double cost, double bound) const {
    if (bound >= cost) return s.num_keys;
    if (bound <= 0) return 0;
    const int32_t size = p_.step->block_size;
    const double blocks = std::nearbyint(bound / cost * s.num_keys / size);
    return std::min(static_cast<int32_t>(blocks) * size, s.num_keys);
  }

  // Takes what lies between two bounds of the item's cost, if there is anything.
  void add_part(const ost_item &item, double from, double to) {
    ost_item part{INT32_MAX, 0, static_cast<int32_t>(p_.segments.size()), 0, p_.num_partials};
    double before = 0;
    for (int32_t n = item.first_segment; n < item.last_segment; ++n) {
      ost_segment s = p_.segments[n];
      const double cost = p_.costs[n];
      const int32_t first = keys_before(s, cost, from - before);
      const int32_t last = keys_before(s, cost, to - before);
      before += cost;
      if (first >= last) continue;
      s.first_entry += first / p_.step->block_size;
      s.first_position += first;
      s.num_keys = last - first;
      part.first_row = std::min(part.first_row, s.first_row);
      part.last_row = std::max(part.last_row, s.last_row);
      p_.segments.push_back(s);
    }
    part.last_segment = static_cast<int32_t>(p_.segments.size());
    if (part.first_segment == part.last_segment) return;
    note_rows(part);
    p_.num_partials += part.last_row - part.first_row;
    p_.items.push_back(part);
  }

  // Notes for which rows a part brings something.
  void note_rows(const ost_item &part) {
    sees_.assign(part.last_row - part.first_row, false);
    for (int32_t n = part.first_segment; n < part.last_segment; ++n)
      std::fill(sees_.begin() + (p_.segments[n].first_row - part.first_row),
                sees_.begin() + (p_.segments[n].last_row - part.first_row), true);
    for (int32_t i = 0; i < part.last_row - part.first_row; ++i)
      if (sees_[i]) seen_.emplace_back(part.first_row + i, p_.num_partials + i);
  }

  Planning &p_;
  std::vector<std::pair<int32_t, int32_t>> seen_;  // rows, and the partials that they are in
  std::vector<bool> sees_;
};

// An item, what it costs, and in how many parts it is cut.
struct Ranked {
  ost_item item;
  double cost;
  int32_t num_parts;
  double part() const { return cost / std::max(1, num_parts); }
};

std::vector<Ranked> rank(const Planning &p, double most) {
  std::vector<Ranked> ranked;
  for (const ost_item &item : p.items) {
    const double cost = cost_of_item(p, item);
    const double parts = std::min(std::ceil(cost / most), std::floor(cost / p.rules->min_part));
    ranked.push_back({item, cost, static_cast<int32_t>(parts)});
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Ranked &a, const Ranked &b) { return a.part() > b.part(); });
  return ranked;
}

}  // namespace

void cut_parts(Planning &planning) {
  Planning &p = planning;
  const double most = most_cost(p);
  pack(p, std::min(most, p.rules->most_packed));
  const std::vector<Ranked> ranked = rank(p, most);
  p.items.clear();
  p.merge_rows.clear();
  p.merge_starts.clear();
  p.merge_partials.clear();
  p.num_partials = 0;
  Cutter cutter(p);
  for (const Ranked &r : ranked) {
    if (r.num_parts < 2)
      p.items.push_back(r.item);
    else
      cutter.cut(r.item, r.num_parts);
  }
  cutter.merge();
}

}  // namespace ost
