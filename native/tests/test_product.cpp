// Are products what the definition says, and do they touch nothing else?
#include <algorithm>

#include "case.h"
#include "ostinato_ops.h"

namespace {

// Bfloat16 numbers up to a page that nobody may touch.
struct Numbers {
  explicit Numbers(int64_t size) : bits(size) { std::memset(bits.data(), 0xff, size * 2); }
  void set(int64_t i, float value) { bits[i] = ost::bfloat16_of_float(value); }
  double at(int64_t i) const { return ost::float_of_bfloat16(bits[i]); }
  Guarded<uint16_t> bits;
};

// Where input i of an output is among the tiles.
int64_t place(int64_t output, int64_t i, int64_t num_inputs) {
  return (output / 32 * (num_inputs / 2) + i / 2) * 64 + output % 32 * 2 + i % 2;
}

// Few rows, as many as the kernels for few take, or so many that they go in blocks.
int32_t rows_of(Random &random) {
  const int32_t most = std::min(ost_ops_product_rows(), 600);
  return random.between(1, random.chance(0.5) ? std::min(most, 64) : most);
}

void check(uint32_t seed) {
  Random random(seed);
  const int32_t num_rows = rows_of(random);
  const int32_t num_inputs = 32 * random.between(1, random.chance(0.2) ? 70 : 9);
  const int32_t num_outputs = 32 * random.between(1, 9);
  const int64_t in_stride = num_inputs + random.between(0, 5);
  const int64_t out_stride = num_outputs + random.between(0, 5);
  Numbers inputs((num_rows - 1) * in_stride + num_inputs);
  Numbers outputs((num_rows - 1) * out_stride + num_outputs);
  Numbers tiles(int64_t{num_inputs} * num_outputs), bias(num_outputs);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < num_inputs; ++i) inputs.set(row * in_stride + i, random.normal());
  for (int64_t i = 0; i < tiles.bits.size(); ++i) tiles.set(i, random.normal());
  for (int64_t i = 0; i < num_outputs; ++i) bias.set(i, random.normal());
  const bool has_bias = random.chance(0.5);
  const ost_product product{{inputs.bits.data(), in_stride},
                            {outputs.bits.data(), out_stride},
                            tiles.bits.data(),
                            has_bias ? bias.bits.data() : nullptr,
                            num_rows,
                            num_inputs,
                            num_outputs,
                            random.between(1, 3)};
  ost_ops_product(&product);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t output = 0; output < num_outputs; ++output) {
      double sum = has_bias ? bias.at(output) : 0, size = std::fabs(sum);
      for (int64_t i = 0; i < num_inputs; ++i) {
        const double part = inputs.at(row * in_stride + i) * tiles.at(place(output, i, num_inputs));
        sum += part;
        size += std::fabs(part);
      }
      const double error = std::fabs(outputs.at(row * out_stride + output) - sum);
      if (!(error <= std::fabs(sum) / 256 + size * 1e-5)) fail(seed, "a product differs");
    }
    for (int64_t i = num_outputs; row + 1 < num_rows && i < out_stride; ++i)
      if (outputs.bits[row * out_stride + i] != 0xffff) fail(seed, "a gap is written");
  }
}

// A product and its gates in one are, to the bit, what they are one after the other.
void check_gated(uint32_t seed) {
  Random random(seed);
  const int32_t rows = rows_of(random), inner = 32 * random.between(1, 5);
  const int32_t num_inputs = 32 * random.between(1, random.chance(0.2) ? 70 : 9);
  const int64_t stride = inner + random.between(0, 5);
  Numbers inputs(int64_t{rows} * num_inputs), gate_up(int64_t{rows} * 2 * inner);
  Numbers once((rows - 1) * stride + inner), apart((rows - 1) * stride + inner);
  Numbers tiles(int64_t{num_inputs} * 2 * inner), bias(2 * inner);
  for (Numbers *numbers : {&inputs, &tiles, &bias})
    for (int64_t i = 0; i < numbers->bits.size(); ++i) numbers->set(i, random.normal());
  ost_gated_product op{{{inputs.bits.data(), num_inputs},
                        {gate_up.bits.data(), 2 * inner},
                        tiles.bits.data(),
                        random.chance(0.5) ? bias.bits.data() : nullptr,
                        rows,
                        num_inputs,
                        2 * inner,
                        random.between(1, 3)},
                       {{gate_up.bits.data(), 2 * inner}, {once.bits.data(), stride}, rows, inner,
                        OST_BFLOAT16, 1}};
  ost_ops_gated_product(&op);
  op.gated.output.data = apart.bits.data();
  ost_ops_product(&op.product);
  ost_ops_gated(&op.gated);
  if (std::memcmp(once.bits.data(), apart.bits.data(), once.bits.size() * 2) != 0)
    fail(seed, "gated in one differs");
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    const uint32_t cases = ost_ops_product_rows() > 0 ? num_cases : 0;  // else there are no products
    for (uint32_t seed = 0; seed < cases; ++seed) {
      check(seed);
      check_gated(seed);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), cases);
  }
}
