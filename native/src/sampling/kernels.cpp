// Chooses tokens of a row, and computes log-probabilities.
//
// A draw finds the first id, in the order of ids, whose sum of weights is above a share of the total. Truncations
// keep the tokens up to some key, in the order of keys, so one key describes what is kept, and nothing is sorted:
//
//   top_k        the k-th key among the tokens not below the best of k chunks
//   top_p        mass by distance from the best score, 1024 buckets in one pass; then the bucket that
//                holds the last token kept, halved until that token is found
//
// Compiled once for each instruction set; OST_SAMPLING is the name of the kernel.
#include "sampling/kernels.h"

#include <cmath>

#include "sampling/edits.h"
#include "sampling/row.h"

namespace {

class Draw {
 public:
  Draw(const Row &row, const ost_sample_row &task)
      : row_(row), task_(task), weights_(row.best(), task.temperature, task.min_p, row.width()) {}

  void run() {
    const Key last = truncated();
    const int64_t total = sum_up(last);
    for (int64_t i = 0; i < task_.num_tokens; ++i) {
      const auto target = static_cast<int64_t>(task_.uniforms[i] * static_cast<double>(total));
      task_.tokens[i] = token_at(target);
    }
  }

  // The mass of all tokens, if it was computed on the way; else -1.
  int64_t whole_mass() const { return whole_mass_; }

  // Mass of chunks up to each; returns that of all tokens not beyond the last key.
  int64_t sum_up(Key last) {
    int64_t sum = 0;
    for (int64_t c = 0; c < row_.chunks(); ++c) {
      if (row_.reaches(c, last) && !weights_.is_void(row_.best_of(c))) {
        int64_t *masses = masses_of(c);
        if (!is_weighed_) weigh(row_.chunk(c), masses);
        if (last < kEverything) row_.drop_beyond(c, last, masses);
        for (int64_t i = 0; i < kChunk; ++i) sum += masses[i];
      }
      row_.scratch.up_to[c] = sum;
    }
    if (!(last < kEverything)) whole_mass_ = sum;
    return sum;
  }

 private:
  // The last key that top_k and top_p keep.
  Key truncated() {
    const bool cuts_mass = task_.top_p < 1;
    if (task_.top_k > 0 && task_.top_k < row_.width()) {
      const Key last = row_.select(task_.top_k);
      return cuts_mass ? nucleus_of_keys(task_.top_k) : last;
    }
    return cuts_mass ? nucleus() : kEverything;
  }

  Key nucleus_of_keys(int64_t number) {
    Candidate *candidates = row_.scratch.candidates;
    int64_t total = 0;
    for (int64_t first = 0; first < number; first += kChunk) {
      const int64_t size = number - first < kChunk ? number - first : kChunk;
      float scores[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) scores[i] = i < size ? row_.scratch.keys[first + i].score() : kBanned;
      int64_t masses[kChunk];
      weigh(scores, masses);
      for (int64_t i = 0; i < size; ++i) {
        candidates[first + i] = {row_.scratch.keys[first + i], masses[i]};
        total += masses[i];
      }
    }
    return last_below(number, 0, task_.top_p * static_cast<double>(total));
  }

  Key nucleus() {
    int64_t histogram[kBuckets] = {};
    for (int64_t c = 0; c < row_.chunks(); ++c) {
      if (weights_.is_void(row_.best_of(c))) continue;
      int64_t *masses = masses_of(c);
      uint16_t *buckets = row_.scratch.buckets + c * kChunk;
      each_distance(weights_, row_.chunk(c), [&](int64_t i, const Doubles &x) {
        put(masses + i, weights_.masses(x));
        put(buckets + i, Weights::buckets(x));
      });
      for (int64_t i = 0; i < kChunk; ++i) histogram[buckets[i]] += masses[i];
    }
    is_weighed_ = true;
    int64_t total = 0;
    for (const int64_t mass : histogram) total += mass;
    whole_mass_ = total;
    const double goal = task_.top_p * static_cast<double>(total);
    int64_t bucket = 0, before = 0;
    while (static_cast<double>(before + histogram[bucket]) < goal) before += histogram[bucket++];
    return last_below(candidates_in(bucket), before, goal);
  }

  int64_t candidates_in(int64_t bucket) {
    int64_t size = 0;
    for (int64_t c = 0; c < row_.chunks(); ++c) {
      const uint16_t *buckets = row_.scratch.buckets + c * kChunk;
      if (weights_.is_void(row_.best_of(c)) || !holds(buckets, static_cast<uint16_t>(bucket))) continue;
      for (int64_t i = 0; i < kChunk; ++i) {
        if (buckets[i] != bucket) continue;
        row_.scratch.candidates[size++] = {key_of(order_of(row_.chunk(c)[i]), c * kChunk + i),
                                           masses_of(c)[i]};
      }
    }
    return size;
  }

  static bool holds(const uint16_t *buckets, uint16_t bucket) {
    uint16_t any = 0;
    for (int64_t i = 0; i < kChunk; ++i) any |= buckets[i] == bucket;
    return any != 0;
  }

  // The last candidate in the order of keys before which there is less mass than the goal.
  Key last_below(int64_t size, int64_t before, double goal) {
    Candidate *candidates = row_.scratch.candidates;
    int64_t first = 0, last = size;
    while (last - first > 1) {
      const int64_t middle = first + (last - first) / 2;
      std::nth_element(candidates + first, candidates + middle, candidates + last);
      int64_t upper = 0;
      for (int64_t i = first; i < middle; ++i) upper += candidates[i].mass;
      if (static_cast<double>(before + upper) < goal)
        before += upper, first = middle;
      else
        last = middle;
    }
    return candidates[first].key;
  }

  void weigh(const float *scores, int64_t *masses) const {
    each_distance(weights_, scores,
                  [&](int64_t i, const Doubles &x) { put(masses + i, weights_.masses(x)); });
  }

  int64_t *masses_of(int64_t c) const { return row_.scratch.masses + c * kChunk; }

  // The first token at which the sum of masses is above the target.
  int64_t token_at(int64_t target) const {
    int64_t low = 0, high = row_.chunks() - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (row_.scratch.up_to[middle] > target)
        high = middle;
      else
        low = middle + 1;
    }
    const int64_t *masses = masses_of(low);
    int64_t sum = (low == 0 ? 0 : row_.scratch.up_to[low - 1]) + masses[0], i = 0;
    while (sum <= target && i + 1 < kChunk) sum += masses[++i];
    return low * kChunk + i;
  }

  const Row &row_;
  const ost_sample_row &task_;
  const Weights weights_;
  int64_t whole_mass_ = -1;
  bool is_weighed_ = false;  // whether the masses of all chunks are there
};

// Returns the mass of all tokens at temperature 1, if the draw needed it; else -1.
int64_t sample(Row &row, const ost_sample_row &task, bool is_edited) {
  if (task.temperature == 0) {
    const int64_t token = row.argmax();
    for (int64_t i = 0; i < task.num_tokens; ++i) task.tokens[i] = token;
    return -1;
  }
  Draw draw(row, task);
  draw.run();
  return is_edited || task.temperature != 1 || task.min_p > 0 ? -1 : draw.whole_mass();
}

void add_logprobs(const Row &row, const ost_logprobs &entry, int64_t mass) {
  if (mass < 0) {
    ost_sample_row plain{};
    plain.temperature = 1;
    mass = Draw(row, plain).sum_up(kEverything);
  }
  const Weights weights(row.best(), 1, 0, row.width());
  const double total = weights.best + natural_log(std::ldexp(static_cast<double>(mass), -static_cast<int>(weights.scale)));
  for (int64_t i = 0; i < entry.num_tokens; ++i) {
    entry.values[i] = static_cast<double>(row.logit(entry.tokens[i])) - total;
    entry.ranks[i] = row.rank(entry.tokens[i]);
  }
  if (entry.num_alternatives == 0) return;
  row.select(entry.num_alternatives);
  Key *keys = row.scratch.keys;
  std::sort(keys, keys + entry.num_alternatives);
  for (int64_t i = 0; i < entry.num_alternatives; ++i) {
    entry.alternatives[i] = keys[i].id();
    entry.values[entry.num_tokens + i] = static_cast<double>(keys[i].score()) - total;
  }
}

void sample_row(const ost_sampling &op, int64_t index) {
  const ost_sample_row &task = op.rows[index];
  const bool is_edited = has_edits(task);
  Row row(op, index);
  row.load();
  if (is_edited) edit(task, row.scratch.scores, row.width(), row.scratch.counts);
  if (!row.survey()) {
    for (int64_t i = 0; i < task.num_tokens; ++i) task.tokens[i] = -1;
    return;
  }
  const int64_t mass = sample(row, task, is_edited);
  if (op.logprobs == nullptr || op.logprobs[index].num_tokens == 0) return;
  if (is_edited) row.load();
  if (!is_edited || row.survey()) return add_logprobs(row, op.logprobs[index], mass);
  op.logprobs[index].ranks[0] = 0;
}

void logprobs_row(const ost_sampling &op, int64_t index) {
  const ost_logprobs &entry = op.logprobs[index];
  Row row(op, entry.row);
  row.load();
  if (row.survey()) return add_logprobs(row, entry, -1);
  entry.ranks[0] = 0;
}

}  // namespace

namespace ost {

void OST_SAMPLING(const ost_sampling &op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) op.rows == nullptr ? logprobs_row(op, i) : sample_row(op, i);
}

}  // namespace ost
