// A program computes what its operations compute one by one, on any number of threads.
#include <algorithm>

#include <functional>

#include "ostinato_program.h"
#include "scene.h"
#include "weights/tiles.h"

namespace {

// Rows of bfloat16 up to a page that must not be read; between rows there is room for what products
// read up to a multiple of 32 numbers, zero.
struct Matrix {
  Matrix(int64_t num_rows, int64_t width)
      : numbers(num_rows * ost::round_up(width, 32)),
        view{numbers.data(), ost::round_up(width, 32)} {
    std::memset(numbers.data(), 0, numbers.size() * 2);
  }
  void fill(Random &random) {
    for (int64_t i = 0; i < numbers.size(); ++i)
      ost::store_element(numbers.data(), OST_BFLOAT16, i, random.normal());
  }
  void copy(Matrix &other) { std::memcpy(numbers.data(), other.numbers.data(), numbers.size() * 2); }
  bool equals(Matrix &other) {
    return std::memcmp(numbers.data(), other.numbers.data(), numbers.size() * 2) == 0;
  }

  Guarded<uint16_t> numbers;
  ost_matrix view;
};

void run(const std::vector<ost_operation> &operations, int64_t num_rows, int64_t num_logit_rows,
         int32_t num_threads, int64_t rows_per_chunk = 32, Guarded<uint16_t> *arena = nullptr) {
  const ost_program program{operations.data(), static_cast<int64_t>(operations.size()),
                            rows_per_chunk, arena == nullptr ? nullptr : arena->data(),
                            arena == nullptr ? 0 : 2 * arena->size()};
  ost_run_program(&program, num_rows, num_logit_rows, num_threads);
}

// Norm, gate and up, gate, down, add: what is between two attentions, on buffers of its own.
struct FeedForward {
  FeedForward(Random &random, int32_t num_rows, int32_t width_, int32_t inner_)
      : rows(num_rows), width(width_), inner(inner_), stream(rows, width), normed(rows, width),
        gate_up(rows, 2 * inner), gated(rows, inner), down(rows, width), norm_weight(1, width),
        up_tiles(2 * inner, width), down_tiles(width, inner), bias(1, width) {
    for (Matrix *matrix : {&stream, &norm_weight, &up_tiles, &down_tiles, &bias})
      matrix->fill(random);
    // What the number of rows is when a record is laid down is of no account.
    add = {stream.view, {nullptr, 0}, normed.view,
           {norm_weight.view.data, nullptr, 1e-5f, 0, OST_RMS_NORM, 1}, {}, 77, width, OST_BFLOAT16,
           1.f, 1, {}};
    up = {normed.view, gate_up.view, up_tiles.view.data, nullptr, 77, width, 2 * inner,
          OST_BFLOAT16, 1, OST_PLAIN, nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0, 0};
    gate = {gate_up.view, gated.view, 77, inner, OST_BFLOAT16,
            random.pick({OST_SILU, OST_GELU_TANH, OST_RELU}), 1, 1};
    back = {gated.view, down.view, down_tiles.view.data, bias.view.data, 77, inner, width,
            OST_BFLOAT16, 1, OST_PLAIN, nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0, 0};
    add_back = add;
    add_back.addend = down.view;
  }
  std::vector<ost_operation> operations() {
    return {{&add, OST_ADD_NORM, OST_ALL_ROWS},
            {&up, OST_PRODUCT, OST_ALL_ROWS},
            {&gate, OST_GATED, OST_LOGIT_ROWS},
            {&back, OST_PRODUCT, OST_LOGIT_ROWS},
            {&add_back, OST_ADD_NORM, OST_ALL_ROWS}};
  }
  // Let what is between the two norms have room for a chunk's rows, one behind the other.
  void put_into(uint16_t *arena, int64_t num_rows) {
    up.outputs.data = gate.gate_up.data = arena;
    gate.output.data = back.inputs.data = arena + num_rows * 2 * inner;
    back.outputs.data = add_back.addend.data = arena + num_rows * 3 * inner;
  }
  void one_by_one() {
    add.num_rows = gate.num_rows = add_back.num_rows = rows;
    up.num_rows = back.num_rows = rows;
    ost_ops_add_norm(&add);
    ost_ops_product(&up);
    ost_ops_gated(&gate);
    ost_ops_product(&back);
    ost_ops_add_norm(&add_back);
  }

  int32_t rows, width, inner;
  Matrix stream, normed, gate_up, gated, down, norm_weight, up_tiles, down_tiles, bias;
  ost_add_norm add, add_back;
  ost_product up, back;
  ost_gated gate;
};

void check_feed_forward(uint32_t seed) {
  Random random(seed);
  const int32_t rows = random.between(1, 160);
  FeedForward f(random, rows, 32 * random.between(1, 5), 32 * random.between(1, 9));
  Matrix before(rows, f.width), stream(rows, f.width), normed(rows, f.width);
  before.copy(f.stream);
  f.one_by_one();
  stream.copy(f.stream);
  normed.copy(f.normed);
  f.stream.copy(before);
  run(f.operations(), rows, rows, random.between(1, 4));
  if (!f.stream.equals(stream) || !f.normed.equals(normed)) fail(seed, "a program differs");

  const int64_t rows_per_chunk = 32 * random.between(1, 3);
  const int64_t largest = rows < rows_per_chunk ? rows : rows_per_chunk;
  Matrix arena(largest, 3 * f.inner + f.width);
  f.put_into(arena.numbers.data(), largest);
  f.stream.copy(before);
  std::vector<ost_operation> operations = f.operations();
  for (ost_operation &operation : operations) operation.rows = OST_ALL_ROWS;
  run(operations, rows, rows, random.between(1, 4), rows_per_chunk, &arena.numbers);
  if (!f.stream.equals(stream) || !f.normed.equals(normed)) fail(seed, "a program in chunks differs");

  ost_gated_product gated{f.up, f.gate};
  operations[1] = {&gated, OST_GATED_PRODUCT, OST_ALL_ROWS};
  operations.erase(operations.begin() + 2);
  f.stream.copy(before);
  run(operations, rows, rows, random.between(1, 4), rows_per_chunk, &arena.numbers);
  if (!f.stream.equals(stream) || !f.normed.equals(normed)) fail(seed, "gates in one differ");
}

// The scene's rows as keys and values of a layer, and its attention.
void check_attention(uint32_t seed) {
  Scene s(seed);
  const int32_t rows = s.num_rows();
  const auto make = [&] { return Tensor(rows, s.num_heads(), s.value_dim, s.out_dtype, 0); };
  Tensor expected = make(), found = make();
  Guarded<float> partials(int64_t{s.num_partials} * s.num_heads() * (s.value_dim + 2));
  ost_attention step{};
  step.tokens = s.tokens.data();
  step.positions = s.positions.data();
  step.blocks = s.blocks.data();
  step.segments = s.segments.data();
  step.items = s.items.data();
  step.merge_rows = s.merge_rows.data();
  step.merge_starts = s.merge_starts.data();
  step.merge_partials = s.merge_partials.data();
  step.partials = partials.data();
  step.num_heads = s.num_heads();
  step.num_items = static_cast<int32_t>(s.items.size());
  step.num_merges = static_cast<int32_t>(s.merge_rows.size());
  step.window = s.window;
  step.section_keys = s.section_keys;
  step.num_threads = 1;
  ost_layer_attention layer{};
  layer.layer.kv = s.store->kv;
  layer.layer.queries = s.queries->rows;
  layer.layer.sinks = s.has_sinks ? s.sinks.data() : nullptr;
  layer.layer.scale = s.scale;
  layer.layer.soft_cap = s.soft_cap;
  layer.layer.output = found.rows;
  layer.step = &step;
  const ost_operation operation{&layer, OST_ATTEND, OST_ALL_ROWS};
  run({operation}, rows, 0, s.random.between(1, 4));
  ost_attention alone = layer.layer;
  alone.output = expected.rows;
  ost_attend(&alone);
  for (int32_t row = 0; row < rows; ++row)
    for (int32_t head = 0; head < s.num_heads(); ++head)
      for (int32_t d = 0; d < s.value_dim; ++d)
        if (found.at(row, head, d) != expected.at(row, head, d)) fail(seed, "attention differs");
}

void check_write(uint32_t seed) {
  Random random(seed);
  const int32_t rows = random.between(1, 32), heads = random.between(1, 4), size = 32;
  Tensor keys(rows, heads, size, OST_BFLOAT16, 0), values(rows, heads, size, OST_BFLOAT16, 0);
  for (int32_t row = 0; row < rows; ++row)
    for (int32_t head = 0; head < heads; ++head)
      for (int32_t d = 0; d < size; ++d) {
        keys.set(row, head, d, random.normal());
        values.set(row, head, d, random.normal());
      }
  std::vector<int64_t> slots(64);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i);
  random.shuffle(slots);
  Store store(4, OST_BFLOAT16, heads, size, size, 16);
  ost_write write{store.kv, keys.rows, values.rows, slots.data(), 77};
  const ost_operation operation{&write, OST_WRITE, OST_ALL_ROWS};
  run({operation}, rows, 0, random.between(1, 4));
  for (int32_t row = 0; row < rows; ++row)
    for (int32_t head = 0; head < heads; ++head)
      for (int32_t d = 0; d < size; ++d)
        if (store.key(slots[row], head, d) != keys.at(row, head, d) ||
            store.value(slots[row], head, d) != values.at(row, head, d))
          fail(seed, "a slot differs");
}

// Rows of a table, of which some are taken for all rows and some for those with logits.
void check_take(uint32_t seed) {
  Random random(seed);
  const int32_t rows = random.between(1, 32), logit_rows = random.between(0, rows);
  const int32_t table_rows = random.between(1, 50), width = random.between(1, 70);
  Matrix table(table_rows, width), all(rows, width), some(rows, width), untouched(rows, width);
  table.fill(random);
  all.fill(random);
  some.fill(random);
  untouched.copy(some);
  std::vector<int64_t> from(rows);
  for (int64_t &row : from) row = random.between(0, table_rows - 1);
  const auto take = [&](Matrix &output) {
    return ost_take{table.view.data, 2 * int64_t{width}, output.view.data, 2 * int64_t{width},
                    from.data(), 77, 2 * int64_t{width}};
  };
  ost_take takes[] = {take(all), take(some)};
  run({{&takes[0], OST_TAKE, OST_ALL_ROWS}, {&takes[1], OST_TAKE, OST_LOGIT_ROWS}}, rows,
      logit_rows, random.between(1, 4));
  const auto row_of = [&](Matrix &matrix, int64_t row) { return matrix.numbers.data() + row * width; };
  const auto same = [&](const uint16_t *left, const uint16_t *right) {
    return std::memcmp(left, right, 2 * static_cast<size_t>(width)) == 0;
  };
  for (int32_t row = 0; row < rows; ++row) {
    if (!same(row_of(all, row), row_of(table, from[row]))) fail(seed, "a row that was taken");
    if (!same(row_of(some, row), row < logit_rows ? row_of(table, from[row]) : row_of(untouched, row)))
      fail(seed, "a row with logits, or one without");
  }
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 40;
  const bool best_alone = argc > 2;
  for (int32_t isa = best_alone ? ost_best_isa() : 0; isa <= ost_best_isa(); ++isa) {
    ost_use_isa(isa);
    for (uint32_t seed = 0; seed < num_cases; ++seed) {
      check_feed_forward(seed);
      check_attention(seed);
      check_write(seed);
      check_take(seed);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
