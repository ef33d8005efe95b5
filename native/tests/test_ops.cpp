// Operations between products match their definition, and write nothing else.
#include <functional>

#include "case.h"
#include "ostinato_program.h"

namespace {

// Rows of numbers, with gaps between them that stay NaN.
class Matrix {
 public:
  Matrix(int64_t num_rows, int64_t width, int32_t dtype, int64_t gap)
      : num_rows_(num_rows), width_(width), dtype_(dtype),
        bytes_(((num_rows - 1) * (width + gap) + width) * ost::bytes_of(dtype)) {
    std::memset(bytes_.data(), 0xff, bytes_.size());
    view = {bytes_.data(), width + gap};
  }
  void fill(Random &random, float size) {
    each([&](int64_t row, int64_t i) { set(row, i, size * random.normal()); });
  }
  double at(int64_t row, int64_t i) const {
    return ost::load_element(view.data, dtype_, row * view.stride + i);
  }
  void set(int64_t row, int64_t i, double value) {
    ost::store_element(view.data, dtype_, row * view.stride + i, static_cast<float>(value));
  }
  void each(const std::function<void(int64_t, int64_t)> &visit) const {
    for (int64_t row = 0; row < num_rows_; ++row)
      for (int64_t i = 0; i < width_; ++i) visit(row, i);
  }
  bool gaps_are_untouched() const {
    for (int64_t row = 0; row + 1 < num_rows_; ++row)
      for (int64_t i = width_; i < view.stride; ++i)
        if (!std::isnan(at(row, i))) return false;
    return true;
  }

  ost_matrix view;

 private:
  int64_t num_rows_, width_;
  int32_t dtype_;
  Guarded<char> bytes_;
};

struct Case {
  Case(uint32_t seed_, Random &random)
      : seed(seed_), num_rows(random.between(1, 9)), dtype(random.between(0, 1)),
        num_threads(random.between(1, 3)), gap(random.between(0, 5)) {}
  Matrix matrix(int64_t width) const { return Matrix(num_rows, width, dtype, gap); }
  double rounded(double value) const {
    if (dtype == OST_FLOAT32) return value;
    return ost::float_of_bfloat16(ost::bfloat16_of_float(static_cast<float>(value)));
  }
  // A rounding that fell the other way, and what follows from it: two units in the last place.
  void expect(const Matrix &found, int64_t row, int64_t i, double value, double size,
              const char *what) const {
    const double unit = dtype == OST_FLOAT32 ? 0x1p-20 : 0x1p-7;
    if (!(std::abs(found.at(row, i) - value) <= unit * (std::abs(value) + size))) fail(seed, what);
  }

  uint32_t seed;
  int64_t num_rows;
  int32_t dtype, num_threads, gap;
};

double norm_factor(const Matrix &matrix, int64_t row, int64_t first, int64_t width, double epsilon) {
  double squares = 0;
  for (int64_t i = first; i < first + width; ++i) squares += matrix.at(row, i) * matrix.at(row, i);
  return 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
}

void check_add_norm(const Case &c, Random &random) {
  const int32_t width = random.between(1, 200);
  Matrix residual = c.matrix(width), addend = c.matrix(width), output = c.matrix(width);
  Matrix weight(1, width, c.dtype, 0), before = c.matrix(width);
  Matrix gates = c.matrix(1);
  const bool adds = random.chance(0.7), opens = random.chance(0.5);
  gates.fill(random, random.pick({1.f, 10.f, 100.f}));
  residual.fill(random, 3);
  addend.fill(random, 3);
  weight.fill(random, 1);
  before.each([&](int64_t row, int64_t i) { before.set(row, i, residual.at(row, i)); });
  const ost_add_norm op{residual.view, adds ? addend.view : ost_matrix{nullptr, 0}, output.view,
                        {weight.view.data, nullptr, 1e-5f, 0, OST_RMS_NORM, 1}, {}, c.num_rows,
                        width, c.dtype, 1.f, c.num_threads,
                        opens ? gates.view : ost_matrix{nullptr, 0}};
  ost_ops_add_norm(&op);
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const double open = opens ? c.rounded(1 / (1 + std::exp(-gates.at(row, 0)))) : 1;
    const double factor = norm_factor(residual, row, 0, width, 1e-5);
    for (int64_t i = 0; i < width; ++i) {
      const double added = adds ? c.rounded(open * addend.at(row, i)) : 0;
      const double sum = before.at(row, i) + added;
      c.expect(residual, row, i, sum, opens ? std::abs(added) : 0, "the residual stream differs");
      const double normed = c.rounded(residual.at(row, i) * factor);
      c.expect(output, row, i, normed * weight.at(0, i), 0, "a norm differs");
    }
  }
  if (!residual.gaps_are_untouched() || !output.gaps_are_untouched()) fail(c.seed, "a gap");
}

void check_gated(const Case &c, Random &random) {
  const int32_t width = random.between(1, 200);
  Matrix gate_up = c.matrix(2 * width), output = c.matrix(width);
  gate_up.fill(random, random.pick({1.f, 10.f, 60.f}));
  const ost_gated op{gate_up.view, output.view, c.num_rows, width, c.dtype, OST_SILU, 1,
                     c.num_threads};
  ost_ops_gated(&op);
  output.each([&](int64_t row, int64_t i) {
    const double gate = gate_up.at(row, i), up = gate_up.at(row, width + i);
    const double open = c.rounded(gate / (1 + std::exp(-gate)));
    // Below e^-87 a closed gate is not quite zero.
    c.expect(output, row, i, open * up, 1e-25, "a gate differs");
  });
  if (!output.gaps_are_untouched()) fail(c.seed, "a gap");
}

void check_heads(const Case &c, Random &random) {
  const int32_t dim = 2 * random.between(1, 70);
  const int32_t heads = random.between(1, 5), kv_heads = random.between(1, 3);
  const int32_t all = heads + 2 * kv_heads, half = dim / 2;
  const bool normed = random.chance(0.5);
  Matrix projected = c.matrix(int64_t{all} * dim);
  Matrix angles(c.num_rows, dim, OST_FLOAT32, c.gap);  // cosines, then sines
  Matrix queries = c.matrix(int64_t{heads} * dim), keys = c.matrix(int64_t{kv_heads} * dim);
  Matrix values = c.matrix(int64_t{kv_heads} * dim);
  Matrix query_weight(1, dim, c.dtype, 0), key_weight(1, dim, c.dtype, 0);
  for (Matrix *matrix : {&projected, &angles, &query_weight, &key_weight})
    matrix->fill(random, 1);
  const auto norm = [&](const Matrix &weight) {
    return normed ? ost_norm{weight.view.data, nullptr, 1e-6f, 0, OST_RMS_NORM, 1} : ost_norm{};
  };
  const ost_heads op{projected.view, queries.view, keys.view, values.view, angles.view,
                     norm(query_weight), norm(key_weight), c.num_rows, heads, kv_heads, dim, dim,
                     dim, dim, heads * dim, (heads + kv_heads) * dim, OST_HALVES, 1, 0, 0, 0,
                     c.dtype, c.num_threads};
  ost_ops_heads(&op);
  for (int64_t row = 0; row < c.num_rows; ++row)
    for (int32_t head = 0; head < heads + kv_heads; ++head) {
      const bool is_key = head >= heads;
      const Matrix &weight = is_key ? key_weight : query_weight, &found = is_key ? keys : queries;
      const double factor = norm_factor(projected, row, int64_t{head} * dim, dim, 1e-6);
      const auto number = [&](int32_t d) {
        const double value = projected.at(row, int64_t{head} * dim + d);
        return normed ? c.rounded(c.rounded(value * factor) * weight.at(0, d)) : value;
      };
      for (int32_t d = 0; d < dim; ++d) {
        const double other = d < half ? -number(d + half) : number(d - half);
        const double straight = c.rounded(number(d) * angles.at(row, d % half));
        const double across = c.rounded(other * angles.at(row, half + d % half));
        const int64_t place = int64_t{is_key ? head - heads : head} * dim + d;
        c.expect(found, row, place, straight + across, std::abs(straight) + std::abs(across),
                 is_key ? "a key differs" : "a query differs");
      }
    }
  values.each([&](int64_t row, int64_t i) {
    if (values.at(row, i) != projected.at(row, int64_t{heads + kv_heads} * dim + i))
      fail(c.seed, "a value differs");
  });
  if (!queries.gaps_are_untouched() || !keys.gaps_are_untouched()) fail(c.seed, "a gap");
}

// Few different numbers, so that several are the largest; now and then one that is not finite.
void check_best(const Case &c, Random &random) {
  const int32_t width = random.pick({1, 7, random.between(1, 600), random.between(500, 3000)});
  const int32_t dtype = random.between(0, 2);
  Matrix numbers(c.num_rows, width, dtype, c.gap);
  const bool is_low = random.chance(0.3), has_odd = random.chance(0.5);
  numbers.each([&](int64_t row, int64_t i) {
    const double number = random.between(-3, is_low ? 0 : 3);
    numbers.set(row, i, number == 0 && random.chance(0.5) ? -0.0 : number);
  });
  if (has_odd)
    for (int64_t row = 0; row < c.num_rows; ++row) {
      const double odd = random.pick({INFINITY, -INFINITY, NAN, -NAN});
      for (int32_t i = random.between(0, width - 1); i < width; i += 1 + width / 2)
        numbers.set(row, i, odd);
      if (random.chance(0.2))
        for (int32_t i = 0; i < width; ++i) numbers.set(row, i, -INFINITY);
    }
  std::vector<int64_t> places(c.num_rows, -7);
  const ost_best op{numbers.view, places.data(), c.num_rows, width, dtype, c.num_threads};
  ost_ops_best(&op);
  for (int64_t row = 0; row < c.num_rows; ++row) {
    int64_t expected = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double number = numbers.at(row, i), best = numbers.at(row, expected);
      if (!std::isnan(best) && (std::isnan(number) || number > best)) expected = i;
    }
    if (!std::isfinite(numbers.at(row, expected))) expected = -1;
    if (places[row] != expected) fail(c.seed, "the largest number is elsewhere");
  }
}

// Token by token, as the rule says; sequences longer and shorter than a chunk.
void check_scan(const Case &c, Random &random) {
  const int32_t key_dim = random.between(1, 40), value_dim = random.between(1, 70);
  const int32_t num_keys = random.between(1, 2), num_heads = num_keys * random.between(1, 3);
  const int32_t num_tokens = random.pick({1, 64, random.between(1, 150)}), num_sequences = 2;
  const bool is_delta = random.chance(0.5), has_norms = random.chance(0.5), is_turned = random.chance(0.5);
  const int64_t rows = int64_t{num_sequences} * num_tokens, heads = int64_t{num_sequences} * num_heads;
  const int32_t dtype = random.between(0, 1), state_size = key_dim * value_dim;
  const auto floats = [](Matrix &matrix) { return static_cast<float *>(matrix.view.data); };
  Matrix queries(rows, num_keys * key_dim, dtype, c.gap), keys(rows, num_keys * key_dim, dtype, c.gap);
  Matrix values(rows, num_heads * value_dim, dtype, c.gap);
  Matrix outputs(rows, num_heads * value_dim, OST_FLOAT32, c.gap), skips(num_heads, 1, OST_FLOAT32, 0);
  Matrix gates(rows, num_heads, OST_FLOAT32, 0), betas(rows, num_heads, OST_FLOAT32, 0);
  Matrix states(heads, state_size, OST_FLOAT32, 0);
  for (Matrix *matrix : {&queries, &keys}) matrix->fill(random, .2f);
  for (Matrix *matrix : {&values, &betas, &states, &skips}) matrix->fill(random, .5f);
  gates.each([&](int64_t row, int64_t i) { gates.set(row, i, -.1 * random.between(0, 20)); });
  std::vector<double> expected(heads * state_size);
  states.each([&](int64_t row, int64_t i) { expected[row * state_size + i] = states.at(row, i); });
  const ost_scan op{floats(states), queries.view, keys.view, values.view, outputs.view, floats(gates),
                    floats(betas), floats(skips), heads, num_heads, num_tokens, num_heads, num_keys, key_dim,
                    value_dim, dtype, OST_FLOAT32, is_delta, has_norms, is_turned, false, .5f,
                    0, INFINITY, c.num_threads};
  ost_ops_scan(&op);
  const auto near = [&](double found, double wanted, const char *what) {
    if (!(std::abs(found - wanted) <= 1e-3 + 1e-3 * std::abs(wanted))) fail(c.seed, what);
  };
  for (int64_t unit = 0; unit < heads; ++unit) {
    const int64_t head = unit % num_heads, first = head / (num_heads / num_keys) * key_dim;
    const auto state = [&](int32_t k, int32_t v) -> double & {
      return expected[unit * state_size + (is_turned ? v * key_dim + k : k * value_dim + v)];
    };
    for (int32_t token = 0; token < num_tokens; ++token) {
      const int64_t row = unit / num_heads * num_tokens + token;
      const auto factor = [&](const Matrix &from) {
        double squares = has_norms ? 1e-6 : 1;
        for (int32_t k = 0; k < key_dim && has_norms; ++k)
          squares += from.at(row, first + k) * from.at(row, first + k);
        return 1 / std::sqrt(squares);
      };
      const double of_keys = factor(keys), of_queries = .5 * factor(queries);
      for (int32_t v = 0; v < value_dim; ++v) {
        const double value = values.at(row, head * value_dim + v);
        double said = 0, read = skips.at(head, 0) * value;
        for (int32_t k = 0; k < key_dim; ++k) {
          state(k, v) *= std::exp(gates.at(row, head));
          said += state(k, v) * keys.at(row, first + k) * of_keys;
        }
        const double change = betas.at(row, head) * (value - (is_delta ? said : 0));
        for (int32_t k = 0; k < key_dim; ++k) {
          state(k, v) += change * keys.at(row, first + k) * of_keys;
          read += state(k, v) * queries.at(row, first + k) * of_queries;
        }
        near(outputs.at(row, head * value_dim + v), read, "what a scan reads differs");
      }
    }
  }
  states.each([&](int64_t row, int64_t i) {
    near(states.at(row, i), expected[row * state_size + i], "a scan's state differs");
  });
  if (!outputs.gaps_are_untouched()) fail(c.seed, "a scan wrote into a gap");
}

// One token of each of some sequences, in slots of no order; the convolution takes each input as it is,
// and one slot is unused.
void check_step(const Case &c, Random &random) {
  const int32_t key_dim = random.between(1, 40), value_dim = random.between(1, 150), rows = c.num_rows;
  const int32_t num_keys = random.between(1, 2), num_heads = num_keys * random.between(1, 20);
  const int32_t keys = num_keys * key_dim, width = 2 * keys + num_heads * value_dim;
  const int32_t state_size = key_dim * value_dim;
  const bool is_delta = random.chance(0.5);
  const auto floats = [](Matrix &matrix) { return static_cast<float *>(matrix.view.data); };
  Matrix projected(rows, width, OST_FLOAT32, c.gap), convolved(rows, width, OST_FLOAT32, c.gap);
  Matrix stepped(rows, 2 * num_heads, OST_FLOAT32, c.gap), weights(width, 2, OST_FLOAT32, 0);
  Matrix outputs(rows, num_heads * value_dim, OST_FLOAT32, c.gap), heads(3, num_heads, OST_FLOAT32, 0);
  Matrix gates(rows, num_heads, OST_FLOAT32, 0), betas(rows, num_heads, OST_FLOAT32, 0);
  Matrix earlier((rows + 1) * width, 1, OST_FLOAT32, 0), states((rows + 1) * num_heads, state_size, OST_FLOAT32, 0);
  for (Matrix *matrix : {&projected, &stepped, &earlier, &states, &heads}) matrix->fill(random, .5f);
  weights.each([&](int64_t row, int64_t tap) { weights.set(row, tap, static_cast<double>(tap)); });
  std::vector<int64_t> starts, slots, is_fresh(rows, 0);
  for (int64_t slot = 0; slot <= rows; ++slot) starts.push_back(slot), slots.push_back(slot);
  random.shuffle(slots);
  std::vector<ost_channels> runs;
  for (int32_t first = 0; first < width; first += 37) runs.push_back({first, first, std::min(37, width - first)});
  std::vector<int32_t> decay_columns, beta_columns;
  for (int32_t head = 0; head < num_heads; ++head)
    decay_columns.push_back(2 * head), beta_columns.push_back(2 * head + 1);
  std::vector<double> expected((rows + 1) * num_heads * state_size);
  states.each([&](int64_t row, int64_t i) { expected[row * state_size + i] = states.at(row, i); });
  const auto part = [&](int32_t first) { return ost_matrix{floats(convolved) + first, convolved.view.stride}; };
  const ost_sequences step{starts.data(), slots.data(), is_fresh.data(), rows};
  ost_mixer op{{floats(states), part(0), part(keys), part(2 * keys), outputs.view, floats(gates),
                floats(betas), nullptr, 0, num_heads, 0, num_heads, num_keys, key_dim, value_dim,
                OST_FLOAT32, OST_FLOAT32, is_delta, is_delta, !is_delta, false, .5f, 0, INFINITY, 1},
               &step, projected.view, convolved.view, stepped.view, earlier.view.data, runs.data(),
               weights.view.data, nullptr, decay_columns.data(), is_delta ? beta_columns.data() : nullptr,
               floats(heads), floats(heads) + num_heads, floats(heads) + 2 * num_heads,
               static_cast<int32_t>(runs.size()), width, 2, 0, OST_FLOAT32, OST_FLOAT32, OST_FLOAT32, 2.f};
  const ost_operation operation{&op, OST_MIXER, OST_ALL_ROWS};
  const ost_program program{&operation, 1, 32, nullptr, 0};
  ost_run_program(&program, rows, 0, c.num_threads);
  const auto near = [&](double found, double wanted, const char *what) {
    if (!(std::abs(found - wanted) <= 1e-3 + 1e-3 * std::abs(wanted))) fail(c.seed, what);
  };
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t first = head / (num_heads / num_keys) * key_dim;
      const auto length = [&](int64_t from) {
        double squares = 1e-6;
        for (int32_t k = 0; k < key_dim; ++k) squares += std::pow(projected.at(row, from + first + k), 2);
        return is_delta ? std::sqrt(squares) : 1;
      };
      const double by_query = .5 / length(0), by_key = 1 / length(keys);
      const double raw = stepped.at(row, 2 * head) + heads.at(1, head), time = std::log1p(std::exp(raw));
      const double decay = std::exp(-std::exp(heads.at(0, head)) * time);
      const double beta = is_delta ? 2 / (1 + std::exp(-stepped.at(row, 2 * head + 1))) : time;
      double *own = expected.data() + (slots[row] * num_heads + head) * state_size;
      for (int32_t v = 0; v < value_dim; ++v) {
        const auto state = [&](int32_t k) -> double & { return own[is_delta ? k * value_dim + v : v * key_dim + k]; };
        const double value = projected.at(row, 2 * keys + head * value_dim + v);
        double said = 0, read = heads.at(2, head) * value * (is_delta ? 0 : 1);
        for (int32_t k = 0; k < key_dim; ++k)
          said += (state(k) *= decay) * projected.at(row, keys + first + k) * by_key;
        for (int32_t k = 0; k < key_dim; ++k) {
          state(k) += beta * (value - (is_delta ? said : 0)) * projected.at(row, keys + first + k) * by_key;
          read += state(k) * projected.at(row, first + k) * by_query;
        }
        near(outputs.at(row, head * value_dim + v), read, "what a step reads differs");
      }
    }
  states.each([&](int64_t row, int64_t i) {
    near(states.at(row, i), expected[row * state_size + i], "a step's state differs");
  });
  for (int64_t row = 0; row < rows; ++row)
    for (int32_t i = 0; i < width; ++i)
      if (earlier.at(slots[row] * width + i, 0) != projected.at(row, i)) fail(c.seed, "an input is not kept");
  for (Matrix *matrix : {&outputs, &convolved})
    if (!matrix->gaps_are_untouched()) fail(c.seed, "a step wrote into a gap");
}

void check_convolution(const Case &c, Random &random) {
  const int32_t width = random.between(1, 90), num_taps = random.between(1, 5);
  const int32_t num_tokens = random.between(1, 9), dtype = random.between(0, 1);
  const int64_t rows = c.num_rows * num_tokens, kept = num_taps - 1;
  Matrix inputs(rows, width, dtype, c.gap), outputs(rows, width, dtype, c.gap);
  Matrix earlier(c.num_rows * kept + 1, width, dtype, 0), weights(num_taps, width, OST_FLOAT32, 0);
  for (Matrix *matrix : {&inputs, &earlier, &weights}) matrix->fill(random, .5f);
  const ost_convolution op{inputs.view, earlier.view.data, static_cast<float *>(weights.view.data),
                           nullptr, outputs.view, rows, num_tokens, width, num_taps, dtype, 0,
                           c.num_threads};
  ost_ops_convolution(&op);
  outputs.each([&](int64_t row, int64_t i) {
    double sum = 0;
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      const int64_t at = row % num_tokens + tap - kept;
      sum += weights.at(tap, i) * (at >= 0 ? inputs.at(row - kept + tap, i)
                                           : earlier.at(row / num_tokens * kept + at + kept, i));
    }
    if (!(std::abs(outputs.at(row, i) - sum) <= 1e-5 + 4e-3 * std::abs(sum)))
      fail(c.seed, "a convolution differs");
  });
  if (!outputs.gaps_are_untouched()) fail(c.seed, "a convolution wrote into a gap");
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    for (uint32_t seed = 0; seed < num_cases; ++seed) {
      Random random(seed);
      const Case c(seed, random);
      check_add_norm(c, random);
      check_gated(c, random);
      check_heads(c, random);
      check_best(c, random);
      check_scan(c, random);
      check_step(c, random);
      check_convolution(c, random);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
