// Products match their definition on every instruction set, and write nothing else.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "case.h"
#include "weights/code_tables.h"
#include "packed_weight.h"
#include "weights/scale_tiles.h"

namespace {

// Few rows, as many as the kernels for few take, or so many that they go in blocks.
int32_t rows_of(Random &random) { return random.between(1, random.chance(0.5) ? 64 : 600); }

void check_packing(uint32_t seed) {
  Random random(seed);
  const int32_t dtype = random.pick({OST_FLOAT32, OST_BFLOAT16, OST_FLOAT16});
  Weight weight(random, random.between(1, 150), random.between(1, 150), dtype);
  double sizes = 0, packed_sizes = 0;
  for (int64_t output = 0; output < weight.num_outputs; ++output)
    for (int64_t input = 0; input < weight.num_inputs; ++input) {
      const double number = weight.plain.at(output * weight.num_inputs + input);
      const int64_t place = ost::place_in_tiles(dtype, weight.padded_inputs(), output, input);
      if (weight.tiles.at(place) != number) fail(seed, "a number is elsewhere");
      sizes += std::fabs(number);
    }
  for (int64_t i = 0; i < weight.tiles.size(); ++i) packed_sizes += std::fabs(weight.tiles.at(i));
  if (std::fabs(sizes - packed_sizes) > sizes * 1e-9) fail(seed, "what is added is not zero");
  Numbers found(weight.plain.size(), dtype);
  const ost_packing all = weight.packing(found, 0, weight.num_outputs);
  ost_unpack(&all);
  if (!found.same(weight.plain, 0, 0, found.size())) fail(seed, "unpacking differs");
}

struct Product {
  Product(Random &random, int32_t dtype) : Product(random, dtype, inputs_of(random)) {}
  Product(Random &random, int32_t dtype, int32_t num_inputs)
      : num_rows(rows_of(random)),
        weight(random, random.between(1, 300), num_inputs, dtype),
        in_stride(weight.padded_inputs() + random.between(0, 5)),
        out_stride(weight.num_outputs + random.between(0, 5)),
        inputs((num_rows - 1) * in_stride + weight.padded_inputs(), dtype),
        outputs((num_rows - 1) * out_stride + weight.num_outputs, dtype),
        bias(weight.num_outputs, dtype), has_bias(random.chance(0.5)) {
    inputs.fill(random);
    bias.fill(random);
    record = {{inputs.data(), in_stride},
              {outputs.data(), out_stride},
              weight.tiles.data(),
              has_bias ? bias.data() : nullptr,
              num_rows,
              static_cast<int32_t>(weight.padded_inputs()),
              weight.num_outputs,
              dtype,
              random.between(1, 3),
              OST_PLAIN,
              nullptr,
              nullptr,
              nullptr,
              nullptr,
              0,
              0,
              0,
              0,
              0};
  }

  static int32_t inputs_of(Random &random) {
    return random.between(1, random.chance(0.2) ? 2200 : 300);
  }

  int32_t num_rows;
  Weight weight;
  int64_t in_stride, out_stride;
  Numbers inputs, outputs, bias;
  bool has_bias;
  ost_product record;
};

void check_product(uint32_t seed) {
  Random random(seed);
  const int32_t dtype = random.pick({OST_FLOAT32, OST_BFLOAT16, OST_FLOAT16});
  Product p(random, dtype);
  ost_ops_product(&p.record);
  const double unit = dtype == OST_FLOAT32 ? 1e-7 : dtype == OST_BFLOAT16 ? 1 / 256. : 1 / 2048.;
  for (int64_t row = 0; row < p.num_rows; row += 1 + p.num_rows / 40) {
    for (int64_t output = 0; output < p.weight.num_outputs; ++output) {
      double sum = p.has_bias ? p.bias.at(output) : 0, size = std::fabs(sum);
      for (int64_t i = 0; i < p.weight.num_inputs; ++i) {
        const double part = p.inputs.at(row * p.in_stride + i) *
                            p.weight.plain.at(output * p.weight.num_inputs + i);
        sum += part;
        size += std::fabs(part);
      }
      const double error = std::fabs(p.outputs.at(row * p.out_stride + output) - sum);
      if (!(error <= std::fabs(sum) * unit + size * 1e-5)) fail(seed, "a product differs");
    }
    for (int64_t i = p.weight.num_outputs; row + 1 < p.num_rows && i < p.out_stride; ++i)
      if (!std::isnan(p.outputs.at(row * p.out_stride + i))) fail(seed, "a gap is written");
  }
}

// Codes in place of a product's weight, of 4 bits also places in a table, with scales, minima or zeros or none, and inputs in any order.
struct Codes {
  Codes(Random &random, Product &p)
      : bits(random.pick({8, 4})), table(bits == 4 && random.chance(0.5) ? random.pick({OST_MXFP4, OST_IQ4}) : 0),
        is_in_blocks(p.record.dtype != OST_FLOAT16 && random.chance(0.5)),
        num_inputs(p.weight.padded_inputs()),
        has_superblocks(num_inputs % 256 == 0 && random.chance(0.4)),
        group_size(has_superblocks ? random.pick({16, 32}) : 32 * random.pick({1, 2, 4, 9, 100})),
        groups((num_inputs + group_size - 1) / group_size), has_minima(table == 0 && random.chance(0.4)),
        has_zeros(table == 0 && !has_minima && random.chance(0.5)),
        codes(ost::num_tiles(p.weight.num_outputs) * 32 * num_inputs * bits / 8),
        scales(ost::num_tiles(p.weight.num_outputs) * 32 * groups,
               has_superblocks ? OST_FLOAT32 : dtype_of(random)),
        minima(scales.size(), scales.dtype), zeros(scales.size()), order(p.weight.num_inputs) {
    for (int64_t i = 0; i < codes.size(); ++i)
      codes.data()[i] = static_cast<uint8_t>(random.between(0, 255));
    scales.fill(random);
    minima.fill(random);
    if (has_superblocks) {
      scale_tiles = in_superblocks(random, p, scales);
      minimum_tiles = in_superblocks(random, p, minima);
    }
    for (int64_t i = 0; i < zeros.size(); ++i)
      zeros.data()[i] = static_cast<int8_t>(bits == 8 ? random.between(-128, 127) : random.between(0, 15));
    for (int32_t i = 0; i < p.weight.num_inputs; ++i) order.data()[i] = i;
    const bool is_mixed = random.chance(0.3);
    for (int32_t i = p.weight.num_inputs - 1; is_mixed && i > 0; --i)
      std::swap(order.data()[i], order.data()[random.between(0, i)]);
    places.resize(p.weight.num_inputs);
    for (int32_t i = 0; i < p.weight.num_inputs; ++i) places[order.data()[i]] = i;
    p.record.zeros = has_zeros ? zeros.data() : nullptr;
    p.record.order = is_mixed ? order.data() : nullptr;
    p.record.tiles = codes.data();
    const int32_t in_pairs = table != 0 ? table : bits == 8 ? OST_INT8 : OST_INT4;
    p.record.weight_format = is_in_blocks ? in_pairs + 2 : in_pairs;
    p.record.scales = has_superblocks ? scale_tiles.data() : scales.data();
    p.record.minima = !has_minima ? nullptr : has_superblocks ? minimum_tiles.data() : minima.data();
    p.record.scale_dtype = has_superblocks ? OST_SUPERBLOCKS : scales.dtype;
    p.record.group_size = group_size;
    p.record.used_inputs = p.weight.num_inputs;
  }
  // Random superblocks, and the numbers that they are.
  std::vector<char> in_superblocks(Random &random, const Product &p, Numbers &numbers) const {
    const int64_t tiles = ost::num_tiles(p.weight.num_outputs);
    std::vector<char> memory(tiles * ost::bytes_of_scales(OST_SUPERBLOCKS, groups, group_size));
    for (int64_t place = 0; place < tiles * groups * 32; ++place) {
      const ost::SuperblockPlace at(place, group_size);
      uint16_t factor;
      std::memcpy(&factor, &memory[at.factors], sizeof factor);
      if (factor == 0) factor = ost::float16_of_float(random.between(1, 999) / 4096.f);
      std::memcpy(&memory[at.factors], &factor, sizeof factor);
      memory[at.bytes] = static_cast<char>(random.between(-128, 127));
      numbers.set(place, ost::float_of_float16(factor) * static_cast<signed char>(memory[at.bytes]));
    }
    return memory;
  }
  // As bits allow; with scales of one, and nothing else.
  void become_largest(Random &random) {
    std::memset(codes.data(), bits == 8 ? 0x80 : table != 0 && random.chance(0.5) ? 0 : 0xff, codes.size());
    std::memset(zeros.data(), 0, zeros.size());
    for (int64_t i = 0; i < scales.size(); ++i) {
      scales.set(i, 1);
      minima.set(i, 0);
    }
  }
  static int32_t dtype_of(Random &random) {
    return random.pick({OST_FLOAT32, OST_BFLOAT16, OST_FLOAT16});
  }
  double at(int64_t output, int64_t given) const {
    const int64_t input = places[given];
    const int64_t tile = output / 32, o = output % 32;
    const int64_t place = (tile * groups + input / group_size) * 32 + o;
    const double zero = has_zeros ? zeros[place] : bits == 4 && table == 0 ? 8 : 0;
    const double minimum = has_minima ? minima.at(place) : -zero * scales.at(place);
    const uint8_t *own = &codes[tile * 32 * num_inputs * bits / 8];
    if (is_in_blocks) {
      const int64_t step = o / 16 * (num_inputs / 8) + input / 8, within = o % 16;
      if (bits == 8)
        return static_cast<int8_t>(own[step * 128 + within * 8 + input % 8]) * scales.at(place) + minimum;
      return number_of(own[step * 64 + within % 8 * 8 + input % 8] >> within / 8 * 4 & 15) * scales.at(place) + minimum;
    }
    if (bits == 8)
      return static_cast<int8_t>(own[(input / 2 * 32 + o) * 2 + input % 2]) * scales.at(place) +
             minimum;
    const int64_t nibble = input % 8 / 2;
    const uint8_t both = own[input / 8 * 128 + o * 4 + input % 2 * 2 + nibble / 2];
    return number_of(both >> nibble % 2 * 4 & 15) * scales.at(place) + minimum;
  }
  double number_of(int32_t nibble) const {
    return table == 0 ? nibble : (table == OST_MXFP4 ? ost::Mxfp4::kNumbers : ost::Iq4::kNumbers)[nibble];
  }

  int32_t bits, table;
  bool is_in_blocks;
  int64_t num_inputs;
  bool has_superblocks;
  int32_t group_size;
  int64_t groups;
  bool has_minima, has_zeros;
  Guarded<uint8_t> codes;
  Numbers scales, minima;
  std::vector<char> scale_tiles, minimum_tiles;
  Guarded<int8_t> zeros;
  Guarded<int32_t> order;
  std::vector<int64_t> places;
};

// A row's outputs do not depend on the rows beside it, to the bit.
void check_row_alone(uint32_t seed, bool has_codes) {
  Random random(seed);
  const int32_t dtype = random.pick({OST_FLOAT32, OST_BFLOAT16, OST_FLOAT16});
  Product p(random, dtype);
  std::optional<Codes> codes;
  if (has_codes) {
    codes.emplace(random, p);
    p.record.activation_bits = random.pick({0, 8});
    p.record.activation_group = p.record.activation_bits * random.pick({0, 4});
  }
  ost_ops_product(&p.record);
  for (int turn = 0; turn < 6; ++turn) {
    const int32_t first = random.between(0, p.num_rows - 1), left = p.num_rows - first;
    const int32_t count = random.between(1, turn < 3 ? std::min(left, 9) : left);
    Numbers some(count * p.out_stride, dtype);
    ost_product part = p.record;
    part.inputs.data = static_cast<char *>(p.inputs.data()) +
                       first * p.in_stride * ost::bytes_of(dtype);
    part.outputs.data = some.data();
    part.num_rows = count;
    ost_ops_product(&part);
    for (int32_t row = 0; row < count; ++row)
      if (!some.same(p.outputs, row * p.out_stride, (first + row) * p.out_stride,
                     p.weight.num_outputs))
        fail(seed, "a row depends on those beside it");
  }
}

// Rows of bfloat16 are integers of 16 bits; float16 and AMX round the weights.
void check_codes(uint32_t seed) {
  Random random(seed);
  const int32_t dtype = random.pick({OST_FLOAT32, OST_BFLOAT16, OST_BFLOAT16, OST_FLOAT16});
  const bool is_super = random.chance(0.3);
  Product p(random, dtype, is_super ? 256 * random.between(1, 5) : Product::inputs_of(random));
  Codes codes(random, p);
  // All products are the largest, of one sign.
  const bool is_extreme = !codes.has_superblocks && random.chance(0.2);
  if (is_extreme) {
    codes.become_largest(random);
    for (int64_t i = 0; i < p.inputs.size(); ++i) p.inputs.set(i, -2.f);
  }
  p.record.activation_bits = random.pick({0, 0, 8});
  p.record.activation_group = p.record.activation_bits * random.pick({0, 4});
  const int64_t span = p.record.activation_group == 0 ? p.weight.num_inputs : p.record.activation_group;
  ost_ops_product(&p.record);
  const double unit = dtype == OST_FLOAT32 ? 1e-7 : dtype == OST_BFLOAT16 ? 1 / 256. : 1 / 2048.;
  for (int64_t row = 0; row < p.num_rows; row += 1 + p.num_rows / 20) {
    for (int64_t output = 0; output < p.weight.num_outputs; output += random.between(1, 9)) {
      double sum = p.has_bias ? p.bias.at(output) : 0, sizes = std::fabs(sum), largest = 0, all = 0;
      double rounded = 0, span_largest = 0, span_all = 0;  // by rows of 8 bits
      for (int64_t i = 0; i < p.weight.num_inputs; ++i) {
        const double input = p.inputs.at(row * p.in_stride + i), weight = codes.at(output, i);
        sum += input * weight;
        sizes += std::fabs(input * weight);
        largest = std::max(largest, std::fabs(input));
        all += std::fabs(weight);
        span_largest = std::max(span_largest, std::fabs(input));
        span_all += std::fabs(weight);
        if ((i + 1) % span == 0 || i + 1 == p.weight.num_inputs) {
          rounded += span_largest * span_all / 250;
          span_largest = span_all = 0;
        }
      }
      const bool rounds = dtype == OST_FLOAT16 || uses_x86(OST_AMX);
      const double own = p.record.activation_bits != 0 ? rounded
                         : dtype == OST_FLOAT32        ? 0
                         : rounds                      ? sizes * unit
                                                       : largest * all / 32768;
      const double error = std::fabs(p.outputs.at(row * p.out_stride + output) - sum);
      if (!(error <= std::fabs(sum) * unit + own + sizes * 1e-5 || std::fabs(sum) > 6e4))
        fail(seed, "a product of codes differs");
    }
    for (int64_t i = p.weight.num_outputs; row + 1 < p.num_rows && i < p.out_stride; ++i)
      if (!std::isnan(p.outputs.at(row * p.out_stride + i))) fail(seed, "a gap is written");
  }
}

// A product and its gates in one are, to the bit, what they are one after the other.
void check_gated(uint32_t seed) {
  Random random(seed);
  const int32_t dtype = random.pick({OST_FLOAT32, OST_BFLOAT16});
  const int32_t rows = rows_of(random), inner = random.between(1, 170);
  Weight weight(random, 2 * inner, random.between(1, random.chance(0.2) ? 2200 : 300), dtype);
  const int64_t stride = inner + random.between(0, 5), width = weight.padded_inputs();
  Numbers inputs(rows * width, dtype), gate_up(int64_t{rows} * 2 * inner, dtype);
  Numbers once((rows - 1) * stride + inner, dtype), apart((rows - 1) * stride + inner, dtype);
  Numbers bias(2 * inner, dtype);
  inputs.fill(random);
  bias.fill(random);
  ost_gated_product op{{{inputs.data(), width},
                        {gate_up.data(), 2 * inner},
                        weight.tiles.data(),
                        random.chance(0.5) ? bias.data() : nullptr,
                        rows,
                        static_cast<int32_t>(width),
                        2 * inner,
                        dtype,
                        random.between(1, 3),
                        OST_PLAIN,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr,
                        0,
                        0,
                        0,
                        0,
                        0},
                       {{gate_up.data(), 2 * inner}, {once.data(), stride}, rows, inner, dtype,
                        random.pick({OST_SILU, OST_GELU_TANH, OST_GELU}), 1, 1}};
  ost_ops_gated_product(&op);
  op.gated.output.data = apart.data();
  ost_ops_product(&op.product);
  ost_ops_gated(&op.gated);
  if (!once.same(apart, 0, 0, once.size())) fail(seed, "gated in one differs");
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  for (uint32_t seed = 0; seed < num_cases; ++seed) check_packing(seed);
  const bool best_alone = argc > 2;
  for (int32_t isa = best_alone ? ost_best_isa() : 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    for (uint32_t seed = 0; seed < num_cases; ++seed) {
      check_product(seed);
      check_row_alone(seed, false);
      check_row_alone(seed, true);
      check_codes(seed);
      check_gated(seed);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
