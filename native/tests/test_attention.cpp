// Every instruction set attends as the definition in float64 does.
#include "scene.h"

namespace {

// What one row's head should be, and the sum of the sizes that were added up for it.
struct Expected {
  std::vector<double> output, size;
};

Expected attend_by_definition(const Scene &s, const Scene::Sequence &sequence, int32_t row,
                              int32_t head) {
  const int32_t kv_head = head / s.group, position = s.positions[row];
  std::vector<double> scores(position + 1, -INFINITY);
  double max = s.has_sinks ? s.sinks[head] : -INFINITY;
  for (int32_t i = 0; i <= position; ++i) {
    if (s.window > 0 && i <= position - s.window) continue;
    double score = 0;
    for (int32_t d = 0; d < s.key_dim; ++d)
      score += s.queries->at(s.tokens[row], head, d) * s.store->key(sequence.slots[i], kv_head, d);
    score *= s.scale;
    if (s.soft_cap > 0) score = s.soft_cap * std::tanh(score / s.soft_cap);
    scores[i] = score;
    max = score > max ? score : max;
  }
  double sum = s.has_sinks ? std::exp(s.sinks[head] - max) : 0;
  for (double &score : scores) sum += score = std::exp(score - max);
  Expected out{std::vector<double>(s.value_dim), std::vector<double>(s.value_dim)};
  for (int32_t i = 0; i <= position; ++i) {
    if (scores[i] == 0) continue;
    for (int32_t d = 0; d < s.value_dim; ++d) {
      const double part = scores[i] / sum * s.store->value(sequence.slots[i], kv_head, d);
      out.output[d] += part;
      out.size[d] += std::fabs(part);
    }
  }
  return out;
}

double rounding_of(int32_t dtype) {
  return dtype == OST_FLOAT32 ? 1e-7 : dtype == OST_FLOAT16 ? 1.0 / 2048 : 1.0 / 256;
}

// Runs the library and returns how far the worst element is from what is allowed; above 1 is wrong.
double worst_error(Scene &s, const std::vector<std::vector<Expected>> &expected,
                   int32_t num_threads) {
  Tensor output(s.num_rows(), s.num_heads(), s.value_dim, s.out_dtype, s.random.pick({0, 0, 1, 5}));
  Guarded<float> partials(int64_t{s.num_partials} * s.num_heads() * (s.value_dim + 2));
  std::memset(partials.data(), 0xff, partials.size() * sizeof(float));
  const ost_attention attention{s.store->kv,
                                s.queries->rows,
                                output.rows,
                                s.tokens.data(),
                                s.positions.data(),
                                s.blocks.data(),
                                s.segments.data(),
                                s.items.data(),
                                s.merge_rows.data(),
                                s.merge_starts.data(),
                                s.merge_partials.data(),
                                partials.data(),
                                s.has_sinks ? s.sinks.data() : nullptr,
                                s.num_heads(),
                                static_cast<int32_t>(s.items.size()),
                                static_cast<int32_t>(s.merge_rows.size()),
                                s.window,
                                s.section_keys,
                                s.scale,
                                s.soft_cap,
                                num_threads};
  ost_attend(&attention);
  const bool rounds_weights = s.is_brain() && uses_x86(OST_AVX512_BF16);
  // Queries and weights as whole numbers are off by half a unit of their largest, in all dimensions.
  const bool is_whole = s.kv_dtype == OST_KV_INT8;
  const double allowed = rounds_weights ? 8e-3 : is_whole ? 1e-3 : 3e-5;
  double worst = 0;
  for (int32_t row = 0; row < s.num_rows(); ++row)
    for (int32_t head = 0; head < s.num_heads(); ++head)
      for (int32_t d = 0; d < s.value_dim; ++d) {
        const Expected &e = expected[row][head];
        const double found = output.at(s.tokens[row], head, d);
        const double size = is_whole ? *std::max_element(e.size.begin(), e.size.end()) : e.size[d];
        const double limit =
            allowed * size + rounding_of(s.out_dtype) * std::fabs(e.output[d]) + 1e-7;
        const double error = std::fabs(found - e.output[d]) / limit;
        if (!(error <= worst)) worst = error;  // NaN is worst of all, and stays
      }
  return worst;
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const uint32_t first_seed = argc > 2 ? std::atoi(argv[2]) : 0;
  std::vector<double> worst(ost_best_isa() + 1);
  for (uint32_t seed = first_seed; seed < first_seed + num_cases; ++seed) {
    Scene scene(seed);
    std::vector<std::vector<Expected>> expected(scene.num_rows());
    for (const Scene::Sequence &sequence : scene.sequences)
      for (int32_t i = 0; i < sequence.num_rows; ++i)
        for (int32_t head = 0; head < scene.num_heads(); ++head)
          expected[sequence.first_row + i].push_back(
              attend_by_definition(scene, sequence, sequence.first_row + i, head));
    for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
      ost_use_isa(isa);
      const double error = worst_error(scene, expected, 1 + seed % 3);
      if (!(error <= 1)) {
        std::fprintf(stderr, "%g times what is allowed\n", error);
        fail(seed, "attention is wrong");
      }
      worst[isa] = error > worst[isa] ? error : worst[isa];
    }
  }
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa)
    std::printf("%s: %u cases, at worst %.2f of the error that is allowed\n", name_of_isa(isa),
                num_cases, worst[isa]);
}
