// Sampling against its definition: sort, add up, look up. Arrays end where a page begins that may not be touched.
#include <cstring>

#include "case.h"
#include "ostinato_sampling.h"

namespace {

template <class T>
struct List {
  explicit List(int64_t size) : items(size) {}
  const T *data() { return items.size() == 0 ? nullptr : items.data(); }
  Guarded<T> items;
};

struct Case {
  Case(uint32_t seed_, Random &random)
      : seed(seed_), width(random.pick({1, 15, 64, 65, random.between(1, 3000)})),
        dtype(random.between(0, 2)), logits(width * ost::bytes_of(dtype)), mask((width + 7) / 8),
        prompt(random.between(0, 9)), output(random.between(0, 9)), banned(random.between(0, 3)),
        uniforms(random.between(1, 9)), tokens(uniforms.items.size()) {
    const bool is_coarse = random.chance(0.5);
    for (int64_t i = 0; i < width; ++i) {
      const float value = is_coarse ? static_cast<float>(random.between(-8, 8)) / 2 : 4 * random.normal();
      ost::store_element(logits.data(), dtype, i, random.chance(0.05) ? -INFINITY : value);
    }
    if (random.chance(0.1))
      ost::store_element(logits.data(), dtype, random.between(0, width - 1), random.pick({NAN, INFINITY}));
    for (int64_t i = 0; i < mask.items.size(); ++i) mask.items[i] = random.pick({0xff, 0xff, 0, 0x5a});
    for (auto *text : {&prompt, &output})
      for (int64_t i = 0; i < text->items.size(); ++i) text->items[i] = random.between(0, width + 1);
    for (int64_t i = 0; i < banned.items.size(); ++i) banned.items[i] = random.between(0, width + 1);
    for (int64_t i = 0; i < uniforms.items.size(); ++i)
      uniforms.items[i] = random.pick({0., 1 - 0x1p-53, random.between(0, 999) / 1000.});
    row = {};
    row.prompt = prompt.data(), row.num_prompt = prompt.items.size();
    row.output = output.data(), row.num_output = output.items.size();
    row.banned = banned.data(), row.num_banned = banned.items.size();
    row.masks[random.between(0, 2)] = random.chance(0.5) ? mask.data() : nullptr;
    row.uniforms = uniforms.data(), row.tokens = tokens.items.data();
    row.num_tokens = uniforms.items.size();
    row.temperature = random.pick({1., 1., 0., .4, 3.});
    row.top_p = random.pick({1., .937, .231});
    row.min_p = random.pick({0., 0., .0417});
    row.top_k = random.pick({0, 0, 1, 5, 100});
    row.repetition = random.pick({1.f, 1.25f});
    row.frequency = random.pick({0.f, .5f});
    row.presence = random.pick({0.f, -1.5f});
  }

  float logit(int64_t id) { return ost::load_element(logits.data(), dtype, id); }

  uint32_t seed;
  int32_t width, dtype;
  Guarded<char> logits;
  List<uint8_t> mask;
  List<uint32_t> prompt, output;
  List<int64_t> banned;
  List<double> uniforms;
  List<int64_t> tokens;
  ost_sample_row row;
};

int64_t count_in(List<uint32_t> &text, int64_t id) {
  return std::count(text.items.data(), text.items.data() + text.items.size(), static_cast<uint32_t>(id));
}

std::vector<float> edited(Case &c) {
  std::vector<float> scores;
  for (int64_t id = 0; id < c.width; ++id) {
    float score = c.logit(id);
    const int64_t count = count_in(c.output, id);
    if (count + count_in(c.prompt, id) > 0 && c.row.repetition != 1)
      score = score > 0 ? score / c.row.repetition : score * c.row.repetition;
    if (count > 0) score -= c.row.frequency * static_cast<float>(count) + c.row.presence;
    for (const uint8_t *mask : c.row.masks)
      if (mask != nullptr && (mask[id / 8] >> id % 8 & 1) == 0) score = -INFINITY;
    const int64_t *banned = c.banned.items.data();
    if (std::count(banned, banned + c.banned.items.size(), id) > 0) score = -INFINITY;
    scores.push_back(score);
  }
  return scores;
}

std::vector<int64_t> in_order(const std::vector<float> &scores) {
  std::vector<int64_t> order(scores.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  return order;
}

// The mass of each token that is kept.
std::vector<int64_t> kept_masses(const Case &c, const std::vector<float> &scores,
                                 const std::vector<int64_t> &order) {
  int scale = 62;
  for (int rest = c.width; rest > 0; rest >>= 1) --scale;
  std::vector<int64_t> masses(scores.size());
  int64_t total = 0, before = 0, place = 0;
  for (const int64_t id : order) {
    const double x = (static_cast<double>(scores[id]) - scores[order[0]]) / c.row.temperature;
    const bool is_out = std::exp(x) < c.row.min_p || (c.row.top_k > 0 && place >= c.row.top_k);
    masses[id] = is_out ? 0 : static_cast<int64_t>(std::ldexp(std::exp(x), scale));
    total += masses[id], ++place;
  }
  const double goal = c.row.top_p * static_cast<double>(total);
  for (const int64_t id : order) {
    const int64_t mass = masses[id];
    if (c.row.top_p < 1 && static_cast<double>(before) >= goal) masses[id] = 0;
    before += mass;
  }
  return masses;
}

void check_tokens(Case &c) {
  const std::vector<float> scores = edited(c);
  bool is_sound = true;
  for (const float score : scores) is_sound = is_sound && !std::isnan(score);
  const std::vector<int64_t> order = is_sound ? in_order(scores) : std::vector<int64_t>{0};
  is_sound = is_sound && std::isfinite(scores[order[0]]);
  std::vector<int64_t> masses;
  if (is_sound && c.row.temperature > 0) masses = kept_masses(c, scores, order);
  int64_t total = 0;
  for (const int64_t mass : masses) total += mass;
  for (int64_t i = 0; i < c.row.num_tokens; ++i) {
    int64_t token = is_sound ? order[0] : -1, sum = 0;
    if (!masses.empty()) {
      const auto target = static_cast<int64_t>(c.row.uniforms[i] * static_cast<double>(total));
      for (token = 0; (sum += masses[token]) <= target;) ++token;
    }
    if (c.row.tokens[i] != token) fail(c.seed, "another token was drawn");
  }
}

void check_logprobs(Case &c, const ost_logprobs &entry) {
  std::vector<float> raw;
  for (int64_t id = 0; id < c.width; ++id) raw.push_back(c.logit(id));
  const std::vector<int64_t> order = in_order(raw);
  double sum = 0;
  for (const float logit : raw) sum += std::exp(static_cast<double>(logit) - raw[order[0]]);
  const double total = raw[order[0]] + std::log(sum);
  const auto expect = [&](double found, int64_t id) {
    if (std::isinf(raw[id]) ? found != raw[id] : !(std::abs(found - (raw[id] - total)) < 1e-6))
      fail(c.seed, "a log-probability differs");
  };
  for (int64_t i = 0; i < entry.num_tokens; ++i) {
    expect(entry.values[i], entry.tokens[i]);
    if (order[entry.ranks[i] - 1] != entry.tokens[i]) fail(c.seed, "a rank differs");
  }
  for (int64_t i = 0; i < entry.num_alternatives; ++i) {
    if (entry.alternatives[i] != order[i]) fail(c.seed, "an alternative differs");
    expect(entry.values[entry.num_tokens + i], order[i]);
  }
}

void check(Case &c, Random &random) {
  const int64_t number = c.row.num_tokens, others = random.between(0, c.width < 9 ? c.width : 9);
  List<double> values(number + others);
  List<int64_t> ranks(number), alternatives(others);
  ranks.items[0] = 0;
  const ost_logprobs entry{0, c.row.tokens, values.items.data(), ranks.items.data(),
                           alternatives.items.data(), number, others};
  const ost_sampling op{{c.logits.data(), c.width}, &c.row, &entry, 1, c.width, c.dtype, 1};
  ost_sample(&op);
  check_tokens(c);
  if (ranks.items[0] > 0) check_logprobs(c, entry);
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    for (uint32_t seed = 0; seed < num_cases; ++seed) {
      Random random(seed);
      Case c(seed, random);
      check(c, random);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
