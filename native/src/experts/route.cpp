// Routes each row to its experts. Scalar, since a row has a few hundred numbers: they are computed in
// the same order whatever rows are beside it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd/formats.h"
#include "ostinato_experts.h"
#include "threads/work.h"

namespace ost {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kRowsPerThread = 16;

// e^x, on every system alike: the series is summed up in double, and its rest is below a float's.
double exponential(double x) {
  if (!(x >= -104.)) return x != x ? x : 0.;
  if (x > 89.) return std::numeric_limits<double>::infinity();
  const double power = std::nearbyint(x * 1.4426950408889634);
  const double rest = x - power * 0.6931471805599453;
  double sum = 1;
  for (int k = 11; k > 0; --k) sum = 1 + rest / k * sum;
  return std::ldexp(sum, static_cast<int>(power));
}

float exponential(float x) { return static_cast<float>(exponential(static_cast<double>(x))); }

float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }

float capped(float x, float cap) {
  return cap > 0.f ? static_cast<float>(cap - 2. * cap / (exponential(2. * x / cap) + 1.)) : x;
}

class Router {
 public:
  explicit Router(const ost_routing &r)
      : r_(r), scores_(static_cast<size_t>(r.num_experts)), choice_(scores_.size()) {}

  void route(int64_t row) {
    int64_t *experts = r_.experts + row * r_.top_k;
    float *weights = r_.weights + row * r_.top_k;
    score(row);
    if (r_.num_groups > 1) drop_groups();
    if (r_.scores == OST_SPARSE_MIXER) return mix(experts, weights);
    choose(experts);
    weigh(experts, weights);
  }

 private:
  void score(int64_t row) {
    const int64_t begin = row * r_.logits.stride;
    for (int32_t e = 0; e < r_.num_experts; ++e) {
      const float logit = capped(load_element(r_.logits.data, r_.dtype, begin + e), r_.cap);
      scores_[e] = r_.scores == OST_SIGMOID ? sigmoid(logit) : logit;
    }
    if (r_.scores == OST_SOFTMAX) softmax(scores_.data(), r_.num_experts);
    for (int32_t e = 0; e < r_.num_experts; ++e)
      choice_[e] = r_.correction == nullptr ? scores_[e] : scores_[e] + r_.correction[e];
  }

  static void softmax(float *numbers, int32_t count) {
    float max = kNever, sum = 0.f;
    for (int32_t i = 0; i < count; ++i) max = std::max(max, numbers[i]);
    for (int32_t i = 0; i < count; ++i) sum += numbers[i] = exponential(numbers[i] - max);
    for (int32_t i = 0; i < count; ++i) numbers[i] /= sum;
  }

  // Experts of all but the best groups are never chosen.
  void drop_groups() {
    const int32_t size = r_.num_experts / r_.num_groups;
    std::vector<float> best(static_cast<size_t>(r_.num_groups));
    for (int32_t group = 0; group < r_.num_groups; ++group) {
      std::vector<float> own(choice_.begin() + group * size, choice_.begin() + (group + 1) * size);
      const auto end = own.begin() + std::min(r_.group_best, size);
      std::partial_sort(own.begin(), end, own.end(), std::greater<float>());
      for (auto each = own.begin(); each != end; ++each) best[group] += *each;
    }
    for (int32_t dropped = r_.kept_groups; dropped < r_.num_groups; ++dropped) {
      int32_t worst = -1;  // of equal ones, the last
      for (int32_t group = 0; group < r_.num_groups; ++group)
        if (best[group] != kNever && (worst < 0 || best[group] <= best[worst])) worst = group;
      if (worst < 0) return;
      best[worst] = kNever;
      std::fill_n(choice_.begin() + worst * size, size, kNever);
    }
  }

  // Also where numbers are none, every place gets another expert.
  void choose(int64_t *experts) {
    taken_.assign(choice_.size(), false);
    for (int32_t k = 0; k < r_.top_k; ++k) experts[k] = next();
  }

  int32_t next() {
    int32_t best = -1;
    for (int32_t e = 0; e < r_.num_experts; ++e)
      if (!taken_[e] && (best < 0 || choice_[e] > choice_[best])) best = e;
    taken_[best] = true;
    return best;
  }

  void mix(int64_t *experts, float *weights) {
    taken_.assign(choice_.size(), false);
    for (int32_t k = 0; k < r_.top_k; ++k) {
      const std::vector<bool> before = taken_;
      const int32_t chosen = next();
      const float best = scores_[chosen];
      float sum = 0.f;
      for (int32_t e = 0; e < r_.num_experts; ++e) {
        const float size = std::max(std::abs(scores_[e]), best);
        const bool is_far = (best - scores_[e]) / size > 2.f * r_.jitter;
        if (!before[e] && !is_far) sum += exponential(scores_[e] - best);
      }
      experts[k] = chosen;
      weights[k] = rounded(1.f / sum);
    }
  }

  void weigh(const int64_t *experts, float *weights) const {
    for (int32_t k = 0; k < r_.top_k; ++k) weights[k] = scores_[experts[k]];
    if (r_.scores == OST_SOFTMAX_OF_CHOSEN) softmax(weights, r_.top_k);
    for (int32_t k = 0; k < r_.top_k && r_.scores == OST_SIGMOID_OF_CHOSEN; ++k)
      weights[k] = sigmoid(weights[k]);
    if (r_.divides != 0) {
      float sum = 0.f;
      for (int32_t k = 0; k < r_.top_k; ++k) sum += weights[k];
      sum = std::max(sum + r_.epsilon, r_.floor);
      for (int32_t k = 0; k < r_.top_k; ++k) weights[k] /= sum;
    }
    for (int32_t k = 0; k < r_.top_k; ++k) weights[k] = rounded(weights[k] * r_.scale);
  }

  float rounded(float weight) const {
    uint32_t stored;
    store_element(&stored, r_.weight_dtype, 0, weight);
    return load_element(&stored, r_.weight_dtype, 0);
  }

  const ost_routing &r_;
  std::vector<float> scores_, choice_;
  std::vector<bool> taken_;
};

}  // namespace

}  // namespace ost

extern "C" void ost_route(const ost_routing *routing) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    ost::Router router(*static_cast<const ost_routing *>(record));
    for (int64_t row = first; row < last; ++row) router.route(row);
  };
  ost::run_work({routing, compute, routing->num_rows, ost::kRowsPerThread}, routing->num_threads);
}
