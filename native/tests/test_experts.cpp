// Mixtures, and the updates of adapters in them, match their definition on every instruction set.
//
// Random routers choose; rows are of two adapters and of none. Sums of the definition are in double.
#include <deque>

#include "ostinato_experts.h"
#include "packed_weight.h"

namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

double activated(int32_t activation, double gate, double up) {
  if (activation == OST_RELU_SQUARED) return gate > 0 ? gate * gate : 0;
  if (activation == OST_SILU) return silu(gate) * up;
  if (activation == OST_GELU_TANH)
    return gate / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
  gate = std::min(gate, 2.);
  return (std::clamp(up, -2., 2.) + 1) * gate / (1 + std::exp(-1.5 * gate));
}

// One adapter's updates: of each expert's first product, and of each one's second.
struct Adapter {
  // Few ranks of several, or all of them.
  void add(Random &random, int32_t num_inputs, int32_t num_outputs, int64_t first_output, int32_t dtype) {
    const bool is_shared = random.chance(0.5);
    const int32_t rank = random.between(2, is_shared ? 32 : 70);
    const int32_t first = is_shared ? random.between(0, rank - 1) : 0;
    const int32_t own = is_shared ? random.between(1, rank - first) : 0;
    downs.emplace_back(random, rank, num_inputs, dtype);
    ups.emplace_back(random, num_outputs, rank, dtype);
    parts.push_back({downs.back().tiles.data(), ups.back().tiles.data(), first_output, num_outputs, rank,
                     first, own, 0.1f});
  }
  void end_layer() { counts.push_back(static_cast<int64_t>(parts.size())); }
  void finish() {
    int64_t first = 0;
    for (const int64_t end : counts) layers.push_back({parts.data() + first, end - first}), first = end;
  }
  // Adds what a layer's updates make of numbers.
  void update(int64_t layer, const std::vector<double> &numbers, std::vector<double> &outputs) const {
    for (int64_t i = layer == 0 ? 0 : counts[layer - 1]; i < counts[layer]; ++i) {
      const ost_lora_part &part = parts[i];
      const int32_t end = part.num_own == 0 ? part.rank : part.first_own + part.num_own;
      for (int32_t r = part.first_own; r < end; ++r) {
        double sum = 0;
        for (int32_t in = 0; in < downs[i].num_inputs; ++in)
          sum += numbers[in] * downs[i].plain.at(int64_t{r} * downs[i].num_inputs + in);
        for (int32_t out = 0; out < part.num_outputs; ++out)
          outputs[part.first_output + out] += part.scale * sum * ups[i].plain.at(int64_t{out} * part.rank + r);
      }
    }
  }

  std::deque<Weight> downs, ups;
  std::vector<ost_lora_part> parts;
  std::vector<int64_t> counts;  // parts up to the end of each layer
  std::vector<ost_lora_layer> layers;
};

struct Case {
  Case(Random &random, int32_t dtype_)
      : dtype(dtype_), num_rows(random.between(1, random.chance(0.1) ? 900 : 40)),
        num_experts(random.between(1, 6)), top_k(random.between(1, num_experts)),
        width(random.between(1, 100)), inner(random.between(1, 80)), has_up(random.between(0, 1)),
        padded(static_cast<int32_t>(ost::round_up(inner, 32))), rows_of_first((1 + has_up) * padded),
        rows_of_second(static_cast<int32_t>(ost::round_up(width, 32))), stride(rows_of_second),
        first(random, num_experts * rows_of_first, width, dtype),
        second(random, num_experts * rows_of_second, inner, dtype), inputs(num_rows * stride, dtype),
        first_bias(int64_t{num_experts} * rows_of_first, dtype), second_bias(int64_t{num_experts} * width, dtype),
        logits(int64_t{num_rows} * num_experts, dtype), experts(static_cast<size_t>(num_rows) * top_k),
        weights(experts.size()), adapter_of(num_rows), adapter_layer(random.between(0, 2)) {
    for (Numbers *numbers : {&inputs, &first_bias, &second_bias, &logits}) numbers->fill(random);
    activation = has_up ? random.pick({OST_SILU, OST_GELU_TANH, OST_CLAMPED}) : OST_RELU_SQUARED;
    num_threads = random.between(1, 3);
    route(random);
    for (int which = 0; which < 2; ++which) add_layers(random, adapters[which]);
    for (int32_t row = 0; row < num_rows; ++row) {
      adapter_of[row] = random.between(0, 2);
      if (adapter_of[row] < 2) rows[adapter_of[row]].push_back(row);
    }
  }

  void route(Random &random) {
    const ost_routing routing{{logits.data(), num_experts}, nullptr, experts.data(), weights.data(), num_rows,
                              num_experts, top_k, dtype, OST_FLOAT32, random.between(OST_SOFTMAX, OST_SPARSE_MIXER),
                              1, 1, 1, 1, 1e-6f, 0, 0.5f, random.chance(0.5) ? 2.f : 0.f, 0.3f, num_threads};
    ost_route(&routing);
  }

  void add_layers(Random &random, Adapter &adapter) {
    for (int32_t i = 0; i < adapter_layer; ++i) adapter.end_layer();
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      for (int32_t part = 0; part <= has_up; ++part)
        if (random.chance(0.6)) adapter.add(random, width, inner, int64_t{part} * padded, dtype);
      adapter.end_layer();
    }
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      if (random.chance(0.6)) adapter.add(random, inner, width, 0, dtype);
      adapter.end_layer();
    }
    adapter.finish();
  }

  static ost_product product(const Weight &weight, int32_t num_outputs, const Numbers &bias) {
    return {{}, {}, weight.tiles.data(), bias.data(), 0, static_cast<int32_t>(weight.padded_inputs()),
            num_outputs, weight.plain.dtype, 1, OST_PLAIN, nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0, 0};
  }

  // Computes rows from first on into an array whose rows have a gap, with groups of adapters or without.
  void run(int32_t first_row, int32_t count, Numbers &outputs, const ost_lora_step *step) {
    const int64_t size = ost::bytes_of(dtype), begin = int64_t{first_row} * top_k;
    char *from = static_cast<char *>(inputs.data()) + first_row * stride * size;
    const ost_experts op{{from, stride}, {outputs.data(), width + 1}, &experts[begin], &weights[begin],
                         product(first, rows_of_first, first_bias), product(second, width, second_bias), count,
                         num_experts, top_k, activation, has_up, 1.5f, 2.f, num_threads, step, adapter_layer};
    ost_run_experts(&op);
  }

  std::vector<double> expected(int32_t row) const {
    std::vector<double> sums(width), numbers(width);
    for (int32_t i = 0; i < width; ++i) numbers[i] = inputs.at(row * stride + i);
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t expert = experts[int64_t{row} * top_k + k];
      const auto pre = outputs_of(first, first_bias, expert, rows_of_first, rows_of_first, numbers, row, 0);
      std::vector<double> opened(inner);
      for (int32_t i = 0; i < inner; ++i) opened[i] = activated(activation, pre[i], has_up ? pre[padded + i] : 0);
      const auto own = outputs_of(second, second_bias, expert, rows_of_second, width, opened, row, num_experts);
      for (int32_t i = 0; i < width; ++i) sums[i] += weights[int64_t{row} * top_k + k] * own[i];
    }
    return sums;
  }

  std::vector<double> outputs_of(const Weight &weight, const Numbers &bias, int64_t expert, int64_t apart,
                                 int32_t count, const std::vector<double> &numbers, int32_t row,
                                 int64_t layer) const {
    std::vector<double> outputs(count);
    for (int32_t out = 0; out < count; ++out) {
      outputs[out] = bias.at(expert * count + out);
      for (int32_t in = 0; in < weight.num_inputs; ++in)
        outputs[out] += numbers[in] * weight.plain.at((expert * apart + out) * weight.num_inputs + in);
    }
    if (adapter_of[row] < 2)
      adapters[adapter_of[row]].update(adapter_layer + layer + expert, numbers, outputs);
    return outputs;
  }

  int32_t dtype, num_rows, num_experts, top_k, width, inner, has_up, padded, rows_of_first, rows_of_second;
  int64_t stride;
  Weight first, second;
  Numbers inputs, first_bias, second_bias, logits;
  std::vector<int64_t> experts;
  std::vector<float> weights;
  std::vector<int> adapter_of;  // an index of adapters; 2 stands for rows without one
  int64_t adapter_layer;
  int32_t activation, num_threads;
  Adapter adapters[2];
  std::vector<int64_t> rows[2];
};

void check_routing(uint32_t seed, const Case &own) {
  for (size_t row = 0; row < own.experts.size(); row += own.top_k) {
    std::vector<int64_t> chosen(own.experts.begin() + row, own.experts.begin() + row + own.top_k);
    std::sort(chosen.begin(), chosen.end());
    if (chosen.front() < 0 || chosen.back() >= own.num_experts) fail(seed, "no such expert");
    if (std::unique(chosen.begin(), chosen.end()) != chosen.end()) fail(seed, "an expert is chosen twice");
  }
  for (const float weight : own.weights)
    if (!(weight >= 0 && weight < 1e3f)) fail(seed, "a weight is none");
}

void check_mixture(uint32_t seed) {
  Random random(seed);
  Case own(random, random.pick({OST_FLOAT32, OST_BFLOAT16}));
  check_routing(seed, own);
  const int64_t stride = own.width + 1, size = own.num_rows * stride;
  Numbers together(size, own.dtype), base(size, own.dtype);
  const ost_lora_group groups[2] = {
      {own.rows[0].data(), static_cast<int64_t>(own.rows[0].size()), own.adapters[0].layers.data()},
      {own.rows[1].data(), static_cast<int64_t>(own.rows[1].size()), own.adapters[1].layers.data()}};
  const ost_lora_step step{groups, 2};
  own.run(0, own.num_rows, together, &step);
  own.run(0, own.num_rows, base, nullptr);
  const double unit = own.dtype == OST_FLOAT32 ? 2e-4 : 0.08;
  for (int32_t row = 0; row < own.num_rows; row += 1 + own.num_rows / 40) {
    const std::vector<double> expected = own.expected(row);
    double largest = 1;
    for (const double number : expected) largest = std::max(largest, std::fabs(number));
    for (int32_t i = 0; i < own.width; ++i)
      if (!(std::fabs(together.at(row * stride + i) - expected[i]) <= unit * largest)) fail(seed, "a row differs");
    if (!std::isnan(together.at(row * stride + own.width))) fail(seed, "a gap is written");
    const int which = own.adapter_of[row];
    if (which == 2 && !together.same(base, row * stride, row * stride, own.width))
      fail(seed, "a row without an adapter differs from the base model's");
    const int64_t zero = 0;
    const ost_lora_group group{&zero, 1, own.adapters[which % 2].layers.data()};
    const ost_lora_step one{&group, which < 2 ? 1 : 0};
    Numbers alone(stride, own.dtype);
    own.run(row, 1, alone, &one);
    if (!together.same(alone, row * stride, 0, own.width)) fail(seed, "a row alone differs");
  }
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    for (uint32_t seed = 0; seed < num_cases; ++seed) check_mixture(seed);
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
