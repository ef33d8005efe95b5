// Every instruction set of every processor computes the same bits.
//
// A layer of codes with keys and values of 8 bits, on numbers made of integers. The digests below were
// printed on x86-64; whatever computes something else differs from every machine that agrees with them.
// With an argument, prints digests instead of comparing them.
#include <functional>

#include "case.h"
#include "ops/vector.h"
#include "ostinato_experts.h"
#include "weights/scale_tiles.h"
#include "weights/tiles.h"

namespace {

enum Stage { kTurns, kNorms, kProducts, kHeads, kAttention, kGates, kLogits, kBlocks, kExperts, kTables, kStages };
const char *const kNames[] = {"turns", "norms", "products", "heads", "attention",
                              "gates", "logits", "superblocks", "experts", "tables"};
constexpr uint64_t kExpected[kStages] = {
    0xaacf02d503cafb81, 0x3fd556af59be9b33, 0x592c7a9d52cc07f4,
    0xe74f2f0acbc8dd0d, 0xa2db61444b6474e7, 0x450586aa0e2cc0fe,
    0x4f3bc8a276038ace, 0xaeec5c460dc5f651, 0x3eef8cf18cd3873d, 0xdb6178ba102c4b15};

constexpr int32_t kRows = 45, kWidth = 96, kInner = 160, kHeadDim = 32, kHeads3 = 3, kVocabulary = 70;

// FNV-1a over the bytes of each stage.
struct Digests {
  uint64_t sums[kStages];
  Digests() { std::fill_n(sums, kStages, 0xcbf29ce484222325u); }
  void add(Stage stage, const void *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i)
      sums[stage] = (sums[stage] ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3u;
  }
};

// The same numbers on every system: no library draws them. Bell-shaped, four standard deviations wide.
class Sequence {
 public:
  explicit Sequence(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;  // splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  float number() {
    const uint64_t x = next();
    const auto part = [&](int i) { return static_cast<int32_t>(x >> 16 * i & 0xffff); };
    return static_cast<float>(part(0) + part(1) + part(2) + part(3) - 2 * 0xffff) / 32768.f;
  }

 private:
  uint64_t state_;
};

// Rows of a format side by side, with room for what products read behind their ends.
struct Array {
  Array(int64_t num_rows, int64_t width, int32_t dtype_)
      : dtype(dtype_), view{nullptr, ost::round_up(width, 32)},
        bytes(num_rows * view.stride * ost::bytes_of(dtype_)) {
    view.data = bytes.data();
  }
  Array &fill(uint64_t seed, float center = 0, float size = 1) {
    Sequence sequence(seed);
    for (int64_t i = 0; i < count(); ++i)
      ost::store_element(view.data, dtype, i, center + size * sequence.number());
    return *this;
  }
  int64_t count() const { return static_cast<int64_t>(bytes.size()) / ost::bytes_of(dtype); }
  void *row(int64_t i) { return bytes.data() + i * view.stride * ost::bytes_of(dtype); }
  void add_to(Digests &digests, Stage stage) const {
    digests.add(stage, bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  int32_t dtype;
  ost_matrix view;
  std::vector<char> bytes;
};

// Of all weights: the layout of codes. Bits do not depend on it.
bool is_in_blocks = false;

int32_t packed_format(int32_t format) {
  return is_in_blocks ? format + 2 : format;
}

// Blocks of a file, of which 256 inputs are a row.
struct Blocks {
  int32_t row_kind, format, group_size, num_blocks, block_bytes, scale_dtype;
  int factors[2];  // where float16 are that are drawn, or -1
};
constexpr Blocks kSuperBlocks[] = {{OST_ROWS_Q4_K, OST_INT4, 32, 1, 144, OST_SUPERBLOCKS, {0, 2}},
                                   {OST_ROWS_Q6_K, OST_INT8, 16, 1, 210, OST_SUPERBLOCKS, {208, 208}}};
constexpr Blocks kTabledBlocks[] = {{OST_ROWS_IQ4_XS, OST_IQ4, 32, 1, 136, OST_SUPERBLOCKS, {0, -1}},
                                    {OST_ROWS_IQ4_NL, OST_IQ4, 32, 8, 18, OST_FLOAT16, {0, -1}},
                                    {OST_ROWS_MXFP4, OST_MXFP4, 32, 8, 17, OST_BFLOAT16, {-1, -1}}};

// The nearest codes of a weight of plain numbers, or blocks of a file.
struct Weight {
  Weight(uint64_t seed, int32_t outputs, int32_t inputs, int32_t format, int32_t experts = 1)
      : num_outputs(outputs), num_inputs(inputs), weight_format(packed_format(format)), group_size(32) {
    Array plain(int64_t{experts} * outputs, inputs, OST_FLOAT32);
    plain.fill(seed, 0.05f, 0.2f);
    reserve(int64_t{experts} * outputs, inputs / 32 * int64_t{2}, scales);
    if (format == OST_INT4) reserve(int64_t{experts} * outputs, inputs / 32 * int64_t{2}, minima);
    pack(plain.view.data, plain.view.stride * 4, OST_ROWS_NUMBERS, int64_t{experts} * outputs);
  }
  Weight(uint64_t seed, int32_t outputs, const Blocks &kind)
      : num_outputs(outputs), num_inputs(256), weight_format(packed_format(kind.format)),
        group_size(kind.group_size), scale_dtype(kind.scale_dtype) {
    const int64_t num_blocks = int64_t{outputs} * kind.num_blocks;
    std::vector<uint8_t> blocks(static_cast<size_t>(num_blocks * kind.block_bytes));
    Sequence sequence(seed);
    for (uint8_t &byte : blocks) byte = static_cast<uint8_t>(sequence.next() >> 56);
    for (int64_t block = 0; block < num_blocks; ++block) {
      uint8_t *own = &blocks[static_cast<size_t>(block * kind.block_bytes)];
      if (kind.format == OST_MXFP4) own[0] = static_cast<uint8_t>(112 + own[0] % 16);  // an exponent
      for (const int place : kind.factors) {
        const uint16_t factor = static_cast<uint16_t>(0x1400 + (sequence.next() & 0x3ff));
        if (place >= 0) std::memcpy(own + place, &factor, sizeof factor);
      }
    }
    const int64_t bytes = ost::bytes_of_scales(scale_dtype, 256 / group_size, group_size);
    scales.resize(static_cast<size_t>(ost::num_tiles(outputs) * bytes));
    if (kind.format == OST_INT4) minima.resize(scales.size());
    reserve(outputs, 0, tiles);
    pack(blocks.data(), int64_t{kind.num_blocks} * kind.block_bytes, kind.row_kind, outputs);
  }
  ost_product product(const ost_matrix &inputs, const ost_matrix &outputs, int32_t rows, int32_t dtype,
                      int32_t activation_bits) const {
    return {inputs, outputs, tiles.data(), nullptr, rows, num_inputs, num_outputs, dtype, 2,
            weight_format, scales.data(), minima.empty() ? nullptr : minima.data(), nullptr, nullptr,
            scale_dtype, group_size, num_inputs, activation_bits,
            ost::bits_of_codes(weight_format) == 4 || scale_dtype == OST_SUPERBLOCKS ? activation_bits * 4 : 0};
  }

  int32_t num_outputs, num_inputs, weight_format, group_size, scale_dtype = OST_BFLOAT16;
  std::vector<char> tiles, scales, minima;

 private:
  void reserve(int64_t outputs, int64_t bytes_per_output, std::vector<char> &memory) const {
    memory.resize(static_cast<size_t>(ost::num_tiles(outputs) * 32 * bytes_per_output));
  }
  void pack(const void *rows, int64_t row_bytes, int32_t row_kind, int64_t count) {
    reserve(count, num_inputs * ost::bits_of_codes(weight_format) / 8, tiles);
    const ost_code_packing packing{
        tiles.data(), scales.data(), minima.empty() ? nullptr : minima.data(), rows, nullptr, row_bytes,
        0, count, num_inputs, row_kind, OST_FLOAT32, weight_format, scale_dtype, group_size, 0, 2};
    ost_pack_codes(&packing);
  }
};

ost_norm norm_of(const Array &weight) { return {weight.view.data, nullptr, 1e-5f, 0, OST_RMS_NORM, 1}; }

void check_turns(Digests &digests, std::vector<float> &angles) {
  std::vector<float> given(kRows * kHeadDim / 2), cosines(given.size()), sines(given.size());
  Sequence sequence(1);
  for (size_t i = 0; i < given.size(); ++i)
    given[i] = static_cast<float>(sequence.next() >> (44 + i % 20)) / 8.f;
  ost_turns(given.data(), cosines.data(), sines.data(), static_cast<int64_t>(given.size()));
  for (size_t i = 0; i < given.size(); ++i) {
    const double x = given[i];
    if (std::abs(cosines[i] - std::cos(x)) > 1e-7 || std::abs(sines[i] - std::sin(x)) > 1e-7)
      fail(0, "a cosine or a sine");
  }
  digests.add(kTurns, cosines.data(), kRows * kHeadDim / 2 * 4);
  digests.add(kTurns, sines.data(), kRows * kHeadDim / 2 * 4);
  for (int row = 0; row < kRows; ++row) {  // cosines of a row, then its sines
    const auto from = cosines.begin() + row * kHeadDim / 2, also = sines.begin() + row * kHeadDim / 2;
    angles.insert(angles.end(), from, from + kHeadDim / 2);
    angles.insert(angles.end(), also, also + kHeadDim / 2);
  }
}

// One sequence in three blocks, all of it computed; with and without a window, a cap and a sink.
void attend(Array &queries, Array &keys, Array &values, Array &output, bool is_special) {
  Store store(3, OST_KV_INT8, 1, kHeadDim, kHeadDim, 16);
  std::vector<int32_t> tokens(kRows), blocks{2, 0, 1};
  std::vector<int64_t> slots(kRows);
  for (int32_t i = 0; i < kRows; ++i) {
    tokens[i] = i;
    slots[i] = blocks[i / 16] * 16 + i % 16;
  }
  const auto rows = [](const Array &array) {
    return ost_rows{array.view.data, array.view.stride, kHeadDim, array.dtype};
  };
  const ost_rows key_rows = rows(keys), value_rows = rows(values);
  ost_kv_write(&store.kv, &key_rows, &value_rows, slots.data(), kRows, 2);
  const ost_segment segment{0, 0, kRows, 0, kRows};
  const ost_item item{0, kRows, 0, 1, 0, (kRows + 31) / 32, -1};
  const float sinks[kHeads3] = {0.3f, -2.7f, 11.1f};
  const int32_t starts[] = {0};
  const ost_attention attention{
      store.kv, rows(queries), rows(output), tokens.data(), tokens.data(), blocks.data(), &segment, &item,
      nullptr, starts, nullptr, nullptr, is_special ? sinks : nullptr, kHeads3, 1, 0, is_special ? 20 : 0,
      32, 0.2f, is_special ? 5.f : 0.f, 2};
  ost_attend(&attention);
}

void check_layer(Digests &digests, const std::vector<float> &angles, int32_t dtype, int32_t format,
                 int32_t bits) {
  Array stream(kRows, kWidth, dtype), normed(kRows, kWidth, dtype), norm(1, kWidth, dtype);
  Array projected(kRows, 5 * kHeadDim, dtype), queries(kRows, kWidth, dtype), head_norm(1, kHeadDim, dtype);
  Array keys(kRows, kHeadDim, dtype), values(kRows, kHeadDim, dtype), attended(kRows, kWidth, dtype);
  Array added(kRows, kWidth, dtype), gate_up(kRows, 2 * kInner, dtype), gated(kRows, kInner, dtype);
  Array logits(kRows, kVocabulary, dtype);
  stream.fill(2);
  norm.fill(3, 1, 0.2f);
  head_norm.fill(4, 1, 0.2f);
  const auto multiply = [&](uint64_t seed, Array &from, int32_t inputs, Array &to, int32_t outputs) {
    const Weight weight(seed, outputs, inputs, format);
    const ost_product product = weight.product(from.view, to.view, kRows, dtype, bits);
    ost_ops_product(&product);
  };
  for (const int32_t kind : {OST_LAYER_NORM, OST_RMS_NORM}) {
    ost_norm own = norm_of(norm);
    own.kind = kind;
    const ost_add_norm op{stream.view, {nullptr, 0}, normed.view, own, {}, kRows, kWidth, dtype, 1.f, 2, {}};
    ost_ops_add_norm(&op);
    normed.add_to(digests, kNorms);
  }
  multiply(5, normed, kWidth, projected, 5 * kHeadDim);
  projected.add_to(digests, kProducts);
  const ost_heads heads{projected.view, queries.view, keys.view, values.view,
                        {const_cast<float *>(angles.data()), kHeadDim}, norm_of(head_norm), norm_of(head_norm),
                        kRows, kHeads3, 1, kHeadDim, kHeadDim, kHeadDim, kHeadDim, 3 * kHeadDim,
                        4 * kHeadDim, OST_HALVES, 1, 0, 0, 0, dtype, 2};
  ost_ops_heads(&heads);
  for (const Array *part : {&queries, &keys, &values}) part->add_to(digests, kHeads);
  for (const bool is_special : {true, false}) {
    attend(queries, keys, values, attended, is_special);
    attended.add_to(digests, kAttention);
  }
  multiply(6, attended, kWidth, added, kWidth);
  const ost_add_norm add{stream.view, added.view, normed.view, norm_of(norm), norm_of(norm), kRows, kWidth,
                         dtype, 0.7f, 2, {}};
  ost_ops_add_norm(&add);
  stream.add_to(digests, kNorms);
  multiply(7, normed, kWidth, gate_up, 2 * kInner);
  for (const int32_t activation : {OST_GELU, OST_GELU_TANH, OST_SILU}) {
    const ost_gated gate{gate_up.view, gated.view, kRows, kInner, dtype, activation, 1, 2};
    ost_ops_gated(&gate);
    gated.add_to(digests, kGates);
  }
  multiply(8, gated, kInner, added, kWidth);
  multiply(9, added, kWidth, logits, kVocabulary);
  logits.add_to(digests, kLogits);
  const ost_add_norm open{added.view, stream.view, {nullptr, 0}, {}, {}, kRows, kWidth, dtype, 1.f, 2, logits.view};
  ost_ops_add_norm(&open);
  added.add_to(digests, kNorms);
  Array wide(kRows, 256, dtype), narrow(kRows, kVocabulary, dtype);
  wide.fill(10);
  const auto multiply_blocks = [&](const Blocks &kind, Stage stage) {
    const Weight weight(11, kVocabulary, kind);
    const ost_product product = weight.product(wide.view, narrow.view, kRows, dtype, bits);
    ost_ops_product(&product);
    narrow.add_to(digests, stage);
  };
  for (const Blocks &kind : kSuperBlocks) multiply_blocks(kind, kBlocks);
  for (const Blocks &kind : kTabledBlocks) multiply_blocks(kind, kTables);
}

// A mixture is what its products and gates are one by one, weighed and added in the order of experts.
void check_experts(Digests &digests, int32_t format) {
  constexpr int32_t kExperts3 = 3, kTop = 2, kOwn = 32;
  Array inputs(kRows, kWidth, OST_FLOAT32), logits(kRows, kExperts3, OST_FLOAT32);
  Array outputs(kRows, kWidth, OST_FLOAT32);
  inputs.fill(12);
  logits.fill(13, 0, 2);
  const Weight up(14, 2 * kOwn, kWidth, format, kExperts3), down(15, kWidth, kOwn, format, kExperts3);
  std::vector<int64_t> experts(kRows * kTop);
  std::vector<float> weights(experts.size());
  for (const int32_t scores : {OST_SIGMOID, OST_SOFTMAX}) {
    const ost_routing routing{logits.view, nullptr, experts.data(), weights.data(), kRows, kExperts3, kTop,
                              OST_FLOAT32, OST_FLOAT32, scores, 1, 1, 1, 1, 0, 0, 1, 0, 0, 2};
    ost_route(&routing);
    digests.add(kExperts, weights.data(), static_cast<int64_t>(weights.size()) * 4);
  }
  const ost_experts op{inputs.view, outputs.view, experts.data(), weights.data(),
                       up.product({}, {}, 0, OST_FLOAT32, 0), down.product({}, {}, 0, OST_FLOAT32, 0), kRows,
                       kExperts3, kTop, OST_SILU, 1, 0, 0, 2, nullptr, 0};
  ost_run_experts(&op);
  outputs.add_to(digests, kExperts);
  const auto of_expert = [](const Weight &weight, int64_t expert, Array &from, Array &to) {
    ost_product p = weight.product(from.view, to.view, kRows, OST_FLOAT32, 0);
    const auto part = [&](const std::vector<char> &all) {
      return all.empty() ? nullptr : all.data() + static_cast<int64_t>(all.size()) / kExperts3 * expert;
    };
    p.tiles = part(weight.tiles);
    p.scales = part(weight.scales);
    p.minima = part(weight.minima);
    ost_ops_product(&p);
  };
  Array expected(kRows, kWidth, OST_FLOAT32), gate_up(kRows, 2 * kOwn, OST_FLOAT32);
  Array gated(kRows, kOwn, OST_FLOAT32), share(kRows, kWidth, OST_FLOAT32);
  for (int64_t expert = 0; expert < kExperts3; ++expert) {
    of_expert(up, expert, inputs, gate_up);
    const ost_gated gate{gate_up.view, gated.view, kRows, kOwn, OST_FLOAT32, OST_SILU, 1, 2};
    ost_ops_gated(&gate);
    of_expert(down, expert, gated, share);
    for (int32_t row = 0; row < kRows; ++row)
      for (int32_t k = 0; k < kTop; ++k) {
        if (experts[row * kTop + k] != expert) continue;
        auto *sums = static_cast<float *>(expected.row(row));
        const auto *numbers = static_cast<const float *>(share.row(row));
        for (int32_t i = 0; i < kWidth; ++i)
          sums[i] = std::fma(numbers[i], weights[row * kTop + k], sums[i]);
      }
  }
  if (expected.bytes != outputs.bytes) fail(0, "a mixture is not what its experts are one by one");
}

// Doubles rounded to odd give what one rounding gives: sums that end in ties, and next to them.
void check_fused_multiply_add() {
  Sequence sequence(16);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t x = sequence.next(), y = sequence.next();
    const float a = ost::float_of_bits(static_cast<uint32_t>(x)), b = ost::float_of_bits(x >> 32 & 0xbfffffff);
    const float near = a * b * ost::float_of_bits(0x33000000 + (y & 0x0fffffff));
    const float c = i % 3 == 0 ? ost::float_of_bits(static_cast<uint32_t>(y)) : i % 3 == 1 ? near : -a * b;
    const float as[4] = {a, b, -a, a}, bs[4] = {b, c, b, b}, cs[4] = {c, a, c, c};
    float four[4];
    ost::fused_multiply_add(as, bs, cs, four);
    const float own = four[i % 4], expected = std::fma(as[i % 4], bs[i % 4], cs[i % 4]);
    if (ost::bits_of_float(own) != ost::bits_of_float(expected) && !(own != own && expected != expected))
      fail(static_cast<uint32_t>(i), "a * b + c is not rounded once");
  }
}

// Every reciprocal is the nearest one, which is what makes every quotient right, but for the last divisor,
// which kernels leave to division; and some quotients.
void check_quotients() {
  Sequence sequence(17);
  for (uint32_t bits = 0x3f800000; bits < 0x40000000; bits += kLanes) {
    Floats divisors, numbers;
    for (int i = 0; i < kLanes; ++i) {
      divisors[i] = ost::float_of_bits((bits + i) + (bits % 125 << 23));
      numbers[i] = bits / kLanes % 2 == 0 ? 1.f : sequence.number();
    }
    const Floats own = quotient_by_steps(numbers, divisors), expected = numbers / divisors;
    for (int i = 0; i < kLanes; ++i)
      if (own[i] != expected[i] && std::abs(numbers[i]) > 0x1p-20f && bits + i != 0x3fffffff) fail(bits, "a quotient");
  }
}

Digests digests_of_all() {
  Digests digests;
  std::vector<float> angles;
  check_turns(digests, angles);
  for (const int32_t dtype : {OST_FLOAT32, OST_BFLOAT16})
    for (const int32_t format : {OST_INT8, OST_INT4})
      for (const int32_t bits : {0, 8}) check_layer(digests, angles, dtype, format, bits);
  for (const int32_t format : {OST_INT8, OST_INT4}) check_experts(digests, format);
  return digests;
}

// With AMX, codes are expanded for rows of bfloat16: that is a class of bits of its own.
int32_t last_isa() {
#if defined(__x86_64__)
  return std::min<int32_t>(ost_best_isa(), OST_AVX512_BF16);
#else
  return ost_best_isa();
#endif
}

}  // namespace

int main(int argc, char **argv) {
  const bool prints = argc > 1 && argv[1][0] == 'p';
  check_fused_multiply_add();
  check_quotients();
  for (int32_t isa = 0; isa <= last_isa(); ++isa) {
    ost_use_isa(isa);
    for (const bool blocks : {false, true}) {
      is_in_blocks = blocks;
      const Digests digests = digests_of_all();
      for (int stage = 0; stage < kStages; ++stage) {
        const auto sum = static_cast<unsigned long long>(digests.sums[stage]);
        if (prints) std::printf("%s 0x%016llx\n", kNames[stage], sum);
        else if (sum != kExpected[stage]) fail(0, kNames[stage]);
      }
    }
    std::printf("%s: the bits of every other\n", name_of_isa(isa));
  }
}
