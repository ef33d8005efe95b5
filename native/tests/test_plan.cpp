// In a plan each row sees each of its keys once, and every index is valid.
#include <algorithm>
#include <map>
#include <utility>

#include "case.h"
#include "ostinato_plan.h"

namespace {

// Sequences at random: fresh ones, decodes and chunks, many of which begin as an earlier one does, and
// some of which have given back what left their window.
struct Tables {
  explicit Tables(Random &random) {
    block_size = random.pick({16, 32, 48});
    window = random.chance(0.4) ? random.pick({1, 20, 100, 400}) : 0;
    for (int32_t i = random.between(1, random.chance(0.2) ? 60 : 9); i > 0; --i) add(random);
    for (size_t i = 0; i < tables.size(); ++i) {
      if (window > 0 && random.chance(0.7))
        for (int64_t b = 0; b < std::max<int64_t>(0, firsts[i] - window + 1) / block_size; ++b)
          tables[i][b] = missing;
      blocks.insert(blocks.end(), tables[i].begin(), tables[i].end());
      table_starts.push_back(static_cast<int64_t>(blocks.size()));
    }
  }

  void add(Random &random) {
    const int32_t past = random.chance(0.2) ? 0 : random.between(0, 300);
    const int32_t own = random.chance(0.6) ? 1 : random.between(1, random.chance(0.2) ? 700 : 40);
    const int64_t num_blocks = (past + own + block_size - 1) / block_size;
    std::vector<int64_t> table;
    if (!tables.empty() && random.chance(0.7)) {
      const size_t other = random.between(0, static_cast<int32_t>(tables.size()) - 1);
      const int64_t most = std::min(past, static_cast<int32_t>(firsts[other])) / block_size;
      const int64_t shared = std::min<int64_t>(most, random.between(0, 20));
      table.assign(tables[other].begin(), tables[other].begin() + shared);
    }
    while (static_cast<int64_t>(table.size()) < num_blocks) table.push_back(num_given++);
    tables.push_back(table);
    firsts.push_back(past);
    starts.push_back(starts.back() + own);
  }

  int32_t block_size, window;
  int64_t num_given = 0;
  static constexpr int32_t missing = 1 << 20;
  std::vector<std::vector<int64_t>> tables;
  std::vector<int64_t> starts{0}, firsts, table_starts{0}, blocks;
};

ost_rules random_rules(Random &random, int32_t window) {
  const bool shares = random.chance(0.8);
  ost_rules rules{};
  rules.keys_per_run = shares ? random.pick({0.0, 0.0, 20.0, 128.0}) : INFINITY;
  rules.keys_per_row = random.pick({0.0, 0.0, 4.0});
  rules.row_cost = 0.1;
  rules.min_part = random.pick({1.0, 64.0, 512.0});
  rules.max_packed_cost = random.pick({0.0, 100.0, 1e9});
  rules.item_rows = random.pick({1, 4, 16, 256});
  rules.run_keys = random.pick({16, 32});
  rules.section_keys = random.pick({32, 64, 1024});
  rules.tasks_per_thread = 4;
  rules.window = window;
  rules.group = random.pick({1, 2, 3, 7});
  rules.num_kv_heads = random.between(1, 3);
  rules.num_threads = random.pick({1, 2, 7});
  return rules;
}

using Looks = std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>>;  // token, position: blocks

Looks looks_of(const ost_plan &plan, const ost_rules &rules, int32_t block_size) {
  Looks looks;
  for (int32_t i = 0; i < plan.num_items; ++i) {
    const ost_item &item = plan.items[i];
    for (int32_t n = item.first_segment; n < item.last_segment; ++n) {
      const ost_segment &s = plan.segments[n];
      for (int32_t row = std::max(item.first_row, s.first_row);
           row < std::min(item.last_row, s.last_row); ++row)
        for (int32_t key = 0; key < s.num_keys; ++key) {
          const int32_t position = s.first_position + key, at = plan.positions[row];
          const int32_t section = position / rules.section_keys;
          if (section < item.first_section || section >= item.last_section) continue;
          if (position > at || (rules.window > 0 && position <= at - rules.window)) continue;
          looks[{plan.tokens[row], position}].push_back(plan.blocks[s.first_entry + key / block_size]);
        }
    }
  }
  return looks;
}

void check_looks(const Tables &t, const ost_plan &plan, const ost_rules &rules, uint32_t seed) {
  Looks expected;
  for (size_t i = 0; i < t.tables.size(); ++i)
    for (int64_t row = t.starts[i]; row < t.starts[i + 1]; ++row) {
      const int64_t at = t.firsts[i] + row - t.starts[i];
      const int64_t first = t.window > 0 ? std::max<int64_t>(0, at + 1 - t.window) : 0;
      for (int64_t key = first; key <= at; ++key)
        expected[{static_cast<int32_t>(row), static_cast<int32_t>(key)}].push_back(
            static_cast<int32_t>(t.tables[i][key / t.block_size]));
    }
  if (looks_of(plan, rules, t.block_size) != expected) fail(seed, "a row looks elsewhere");
}

// Each row is in one item that leaves no partials, or all of its partials are in one merge.
void check_merges(const ost_plan &plan, const ost_rules &rules, uint32_t seed) {
  std::vector<int32_t> times(plan.num_rows);
  std::vector<std::map<int32_t, int32_t>> partials(plan.num_rows);  // by section
  for (int32_t i = 0; i < plan.num_items; ++i) {
    const ost_item &item = plan.items[i];
    for (int32_t row = item.first_row; row < item.last_row; ++row) {
      if (item.first_partial < 0) ++times[row];
      for (int32_t s = item.first_section; s < item.last_section && item.first_partial >= 0; ++s) {
        const int32_t begin = s * rules.section_keys, at = plan.positions[row];
        if (begin > at || (rules.window > 0 && begin + rules.section_keys <= at - rules.window + 1))
          continue;
        partials[row][s] = item.first_partial + row - item.first_row +
                           (s - item.first_section) * (item.last_row - item.first_row);
      }
    }
  }
  for (int32_t n = 0; n < plan.num_merges; ++n) {
    const int32_t row = plan.merge_rows[n];
    const std::vector<int32_t> merged(plan.merge_partials + plan.merge_starts[n],
                                      plan.merge_partials + plan.merge_starts[n + 1]);
    std::vector<int32_t> expected;
    for (const auto &[section, partial] : partials[row]) expected.push_back(partial);
    if (merged != expected || merged.back() >= plan.num_partials)
      fail(seed, "a merge is not of a row's partials by section");
    ++times[row];
  }
  for (const int32_t count : times)
    if (count != 1) fail(seed, "a row is computed more or less than once");
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 100;
  for (uint32_t seed = 0; seed < num_cases; ++seed) {
    Random random(seed);
    const Tables t(random);
    const ost_rules rules = random_rules(random, t.window);
    const ost_step step{t.starts.data(),
                        t.firsts.data(),
                        t.blocks.data(),
                        t.table_starts.data(),
                        static_cast<int64_t>(t.blocks.size()),
                        static_cast<int32_t>(t.tables.size()),
                        t.block_size,
                        Tables::missing + 1};
    ost_plan plan{};
    const int64_t needed = ost_make_plan(&step, &rules, nullptr, 0, &plan);
    if (plan.num_rows != 0) fail(seed, "what does not fit is written");
    Guarded<char> arena((needed + 7) / 8 * 8);
    if (ost_make_plan(&step, &rules, arena.data(), needed, &plan) != needed)
      fail(seed, "the same plan takes another room");
    if (plan.num_rows != t.starts.back()) fail(seed, "rows are lost");
    check_looks(t, plan, rules, seed);
    check_merges(plan, rules, seed);
  }
  std::printf("%u cases\n", num_cases);
}
