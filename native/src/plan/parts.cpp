// Splits items by keys so that all threads have work, and packs small items into one.
//
// One sequence of 100,000 tokens is one item; with two heads of keys and sixteen threads, fourteen
// would wait. Its keys are cut into parts of like cost where sections end, and what a part has gathered of
// each section is merged (FlashDecoding's split, Dao et al. 2023):
//
//   segments of an item   ────────────── s y ──────────────┬─ P ─┬─ Q ─
//   sections              ──── 0 ────┼──── 1 ────┼──── 2 ────┼──── 3 ──
//   parts                 ────────── 0 ──────────┼───────── 1 ─────────
//
// Many short items, on the other hand, cost more to begin than to compute: neighbours become one as
// long as all threads still have enough to do.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "plan/plan.h"

namespace ost {
namespace {

double cost_of_item(const Planning &p, const ost_item &item) {
  return std::accumulate(p.costs.begin() + item.first_segment, p.costs.begin() + item.last_segment,
                         0.0);
}

// What a task may cost so that all threads find enough of them.
double max_part_cost(const Planning &p) {
  if (p.rules->num_threads == 1) return std::numeric_limits<double>::infinity();
  const double total = std::accumulate(p.costs.begin(), p.costs.end(), 0.0);
  const int64_t num_tasks = int64_t{p.rules->tasks_per_thread} * p.rules->num_threads;
  return total * p.rules->num_kv_heads / static_cast<double>(num_tasks);
}

// Lets neighbouring items become one while they cost no more than `most` together.
void pack(Planning &p, double max_cost) {
  size_t num_items = 0;
  double cost = 0;
  for (const ost_item &item : p.items) {
    const double more = cost_of_item(p, item);
    if (num_items > 0) {
      ost_item &last = p.items[num_items - 1];
      if (cost + more <= max_cost && item.last_row - last.first_row <= p.max_rows) {
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

// What the sections of an item cost that its rows see.
struct Sections {
  int32_t first;
  std::vector<double> costs;

  Sections(const Planning &p, const ost_item &item) : first(INT32_MAX) {
    const int64_t size = p.rules->section_keys;
    int64_t last = 0;
    each_segment(p, item, [&](const ost_segment &s, double) {
      first = std::min(first, static_cast<int32_t>(s.first_position / size));
      last = std::max(last, (int64_t{s.first_position} + s.num_keys + size - 1) / size);
    });
    costs.resize(std::max<int64_t>(0, last - first));
    each_segment(p, item, [&](const ost_segment &s, double cost) {
      const int64_t end = int64_t{s.first_position} + s.num_keys;
      for (int64_t at = s.first_position, next; at < end; at = next) {
        next = std::min(end, (at / size + 1) * size);
        costs[at / size - first] += cost * static_cast<double>(next - at) / s.num_keys;
      }
    });
  }

  int32_t count() const { return static_cast<int32_t>(costs.size()); }

 private:
  template <class Visit>
  static void each_segment(const Planning &p, const ost_item &item, Visit visit) {
    for (int32_t n = item.first_segment; n < item.last_segment; ++n)
      visit(p.segments[n], p.costs[n]);
  }
};

// Cuts items by keys; what comes out of it stands behind what was there.
class Cutter {
 public:
  explicit Cutter(Planning &planning) : p_(planning) {}

  void cut(const ost_item &item, int32_t num_parts) {
    const Sections sections(p_, item);
    const double total = std::accumulate(sections.costs.begin(), sections.costs.end(), 0.0);
    double before = 0;
    for (int32_t section = 0, first = 0, part = 1; section < sections.count(); ++section) {
      before += sections.costs[section];
      if (section + 1 < sections.count() && before < total * part / num_parts) continue;
      add_part(item, sections.first + first, sections.first + section + 1);
      first = section + 1;
      while (part < num_parts && before >= total * part / num_parts) ++part;
    }
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
  void add_part(ost_item part, int32_t first_section, int32_t last_section) {
    part.first_section = first_section;
    part.last_section = last_section;
    part.first_partial = p_.num_partials;
    for (int32_t section = first_section; section < last_section; ++section) {
      for (int32_t row = part.first_row; row < part.last_row; ++row)
        if (sees(row, section)) seen_.emplace_back(row, p_.num_partials + row - part.first_row);
      p_.num_partials += part.last_row - part.first_row;
    }
    p_.items.push_back(part);
  }

  bool sees(int32_t row, int32_t section) const {
    const int64_t begin = int64_t{section} * p_.rules->section_keys, at = p_.positions[row];
    const int64_t window = p_.rules->window;
    return begin <= at && (window == 0 || begin + p_.rules->section_keys > at - window + 1);
  }

  Planning &p_;
  std::vector<std::pair<int32_t, int32_t>> seen_;  // rows, and the partials that they are in, in order
};

// An item, what it costs, and in how many parts it is cut.
struct Ranked {
  ost_item item;
  double cost;
  int32_t num_parts;
  double part() const { return cost / std::max(1, num_parts); }
};

std::vector<Ranked> rank(const Planning &p, double max_cost) {
  std::vector<Ranked> ranked;
  for (const ost_item &item : p.items) {
    const double cost = cost_of_item(p, item);
    const double parts = std::min(std::ceil(cost / max_cost), std::floor(cost / p.rules->min_part));
    const int32_t max_parts = parts < 2 ? 1 : Sections(p, item).count();
    ranked.push_back({item, cost, std::min(static_cast<int32_t>(parts), max_parts)});
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Ranked &a, const Ranked &b) { return a.part() > b.part(); });
  return ranked;
}

}  // namespace

void cut_parts(Planning &planning) {
  Planning &p = planning;
  const double max_cost = max_part_cost(p);
  pack(p, std::min(max_cost, p.rules->max_packed_cost));
  const std::vector<Ranked> ranked = rank(p, max_cost);
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
