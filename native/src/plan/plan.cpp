// Plans a step from end to end and writes the plan; see plan/plan.h.
#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace ost {
namespace {

void take_sequences(Planning &p) {
  const ost_step &step = *p.step;
  p.max_rows = std::max(1, p.rules->item_rows / p.rules->group);
  p.run_columns = p.rules->run_keys / std::gcd(p.rules->run_keys, step.block_size);
  p.sequences.resize(step.num_sequences);
  for (int32_t i = 0; i < step.num_sequences; ++i) {
    Sequence &s = p.sequences[i];
    s.table = step.blocks + step.table_starts[i];
    s.first_row = static_cast<int32_t>(step.starts[i]);
    s.num_rows = static_cast<int32_t>(step.starts[i + 1] - step.starts[i]);
    s.first_position = static_cast<int32_t>(step.first_positions[i]);
    s.past = s.first_position / step.block_size;
    s.is_chunk = s.num_rows > std::max(1, p.max_rows / 2);
  }
}

// Arrays in the arena, one behind the other, each on lines of its own.
class Arena {
 public:
  explicit Arena(char *memory) : memory_(memory) {}

  int64_t bytes() const { return bytes_; }

  template <class T>
  void measure(const std::vector<T> &numbers) {
    bytes_ += (static_cast<int64_t>(numbers.size() * sizeof(T)) + 63) / 64 * 64;
  }
  template <class T>
  const T *lay(const std::vector<T> &numbers) {
    T *const to = reinterpret_cast<T *>(memory_ + bytes_);
    if (!numbers.empty()) std::memcpy(to, numbers.data(), numbers.size() * sizeof(T));
    measure(numbers);
    return to;
  }

 private:
  char *const memory_;
  int64_t bytes_ = 0;
};

int64_t bytes_of(const Planning &p) {
  Arena arena(nullptr);
  for (const auto *numbers : {&p.tokens, &p.positions, &p.blocks, &p.merge_rows, &p.merge_starts,
                              &p.merge_partials})
    arena.measure(*numbers);
  arena.measure(p.segments);
  arena.measure(p.items);
  return arena.bytes();
}

ost_plan write_plan(const Planning &p, char *memory) {
  Arena arena(memory);
  const auto count = [](const auto &numbers) { return static_cast<int32_t>(numbers.size()); };
  return {arena.lay(p.tokens),
          arena.lay(p.positions),
          arena.lay(p.blocks),
          arena.lay(p.segments),
          arena.lay(p.items),
          arena.lay(p.merge_rows),
          arena.lay(p.merge_starts),
          arena.lay(p.merge_partials),
          count(p.tokens),
          count(p.blocks),
          count(p.segments),
          count(p.items),
          count(p.merge_rows),
          p.num_partials};
}

}  // namespace
}  // namespace ost

extern "C" int64_t ost_make_plan(const ost_step *step, const ost_rules *rules, void *arena,
                                 int64_t num_bytes, ost_plan *plan) {
  if (const int64_t fault = ost::find_fault(*step)) return fault;
  static thread_local ost::Planning planning;
  planning.step = step;
  planning.rules = rules;
  ost::take_sequences(planning);
  ost::fill_windows(planning);
  ost::find_runs(planning);
  ost::order_rows(planning);
  ost::cut_segments(planning);
  ost::cut_parts(planning);
  const int64_t needed = ost::bytes_of(planning);
  if (needed <= num_bytes) *plan = ost::write_plan(planning, static_cast<char *>(arena));
  return needed;
}
