// How is what lies between products computed, with one instruction set?
//
// Compiled once for each; OST_OPS is the function that hands the kernels out. Rounding follows
// transformers: a norm rounds before its weight, RoPE each product, the gate before it multiplies.
#include "ops_kernels.h"

#include <cmath>

#include "ops_best.h"
#include "ops_delta.h"
#include "ops_vector.h"

namespace {

// Heads whose norms are worked out before the first of them is turned.
constexpr int kHeadsAtATime = 16;

template <class Format>
typename Format::Stored *row_of(const ost_matrix &matrix, int64_t row) {
  return static_cast<typename Format::Stored *>(matrix.data) + row * matrix.stride;
}

// Rows that are normed: out = round(x * factor) * weight.
template <class Format>
inline Floats weighed(const Floats &value, float factor, const Floats &weight) {
  return Format::round(value * factor) * weight;
}

// Two sums of squares, so that one addition need not wait for the one before.
struct Squares {
  Floats even{}, odd{};
  void add(int i, const Floats &value) {
    Floats &sum = i & kLanes ? odd : even;
    sum = multiply_add(value, value, sum);
  }
  float norm_factor(int width, float epsilon) const {
    return 1.f / std::sqrt(sum(even + odd) / static_cast<float>(width) + epsilon);
  }
};

template <class Format>
void add_norm_row(const ost_add_norm &op, int64_t row) {
  auto *residual = row_of<Format>(op.residual, row);
  const auto *addend = row_of<Format>(op.addend, row);
  Squares squares;
  each_vector(op.width, [&](int i, auto count) {
    Floats value = load<Format>(residual + i, count);
    if (op.addend.data != nullptr) {
      value = Format::round(value + load<Format>(addend + i, count));
      store<Format>(residual + i, value, count);
    }
    squares.add(i, value);
  });
  const float factor = squares.norm_factor(op.width, op.epsilon);
  const auto *weight = static_cast<const typename Format::Stored *>(op.weight);
  auto *output = row_of<Format>(op.output, row);
  each_vector(op.width, [&](int i, auto count) {
    const Floats value = load<Format>(residual + i, count);
    store<Format>(output + i, weighed<Format>(value, factor, load<Format>(weight + i, count)), count);
  });
}

// Heads of one row that share weight and angles: each of those is widened once for all of them.
template <class Format>
struct Heads {
  using Stored = typename Format::Stored;
  const Stored *weight;  // null: not normed
  const Stored *cosines;
  const Stored *sines;
  int dim;
  float epsilon;

  void turn(const Stored *from, Stored *to, int num_heads) const {
    for (int done = 0; done < num_heads; done += kHeadsAtATime) {
      const int left = num_heads - done;
      turn_some(from + done * dim, to + done * dim, left < kHeadsAtATime ? left : kHeadsAtATime);
    }
  }

 private:
  void turn_some(const Stored *from, Stored *to, int num_heads) const {
    float factors[kHeadsAtATime];
    for (int head = 0; weight != nullptr && head < num_heads; ++head)
      factors[head] = factor(from + head * dim);
    each_vector(dim / 2, [&](int i, auto count) {
      weight == nullptr ? turn_part<false>(from + i, to + i, num_heads, factors, i, count)
                        : turn_part<true>(from + i, to + i, num_heads, factors, i, count);
    });
  }

  float factor(const Stored *from) const {
    Squares squares;
    each_vector(dim, [&](int i, auto count) { squares.add(i, load<Format>(from + i, count)); });
    return squares.norm_factor(dim, epsilon);
  }

  // Numbers i.. of each half: (first, second) times (cos, sin), each product rounded.
  template <bool kNormed, class Count>
  void turn_part(const Stored *from, Stored *to, int num_heads, const float *factors, int i,
                 Count count) const {
    const int half = dim / 2;
    const Floats first_cos = load<Format>(cosines + i, count), first_sin = load<Format>(sines + i, count);
    const Floats second_cos = load<Format>(cosines + half + i, count);
    const Floats second_sin = load<Format>(sines + half + i, count);
    const Floats first_weight = kNormed ? load<Format>(weight + i, count) : Floats{};
    const Floats second_weight = kNormed ? load<Format>(weight + half + i, count) : Floats{};
    for (int head = 0; head < num_heads; ++head, from += dim, to += dim) {
      Floats first = load<Format>(from, count), second = load<Format>(from + half, count);
      if constexpr (kNormed) {
        first = Format::round(weighed<Format>(first, factors[head], first_weight));
        second = Format::round(weighed<Format>(second, factors[head], second_weight));
      }
      store<Format>(to, Format::round(first * first_cos) - Format::round(second * first_sin), count);
      store<Format>(to + half, Format::round(second * second_cos) + Format::round(first * second_sin),
                    count);
    }
  }
};

template <class Format>
void heads_row(const ost_heads &op, int64_t row) {
  using Stored = typename Format::Stored;
  const int num_queries = op.num_heads * op.head_dim, num_keys = op.num_kv_heads * op.head_dim;
  const Stored *from = row_of<Format>(op.projected, row);
  Heads<Format> heads{static_cast<const Stored *>(op.query_weight), row_of<Format>(op.cosines, row),
                      row_of<Format>(op.sines, row), op.head_dim, op.epsilon};
  heads.turn(from, row_of<Format>(op.queries, row), op.num_heads);
  heads.weight = static_cast<const Stored *>(op.key_weight);
  heads.turn(from + num_queries, row_of<Format>(op.keys, row), op.num_kv_heads);
  std::memcpy(row_of<Format>(op.values, row), from + num_queries + num_keys,
              sizeof(Stored) * static_cast<size_t>(num_keys));
}

template <class Format>
void gated_row(const ost_gated &op, int64_t row) {
  const auto *gate = row_of<Format>(op.gate_up, row);
  const auto *up = gate + op.width;
  auto *output = row_of<Format>(op.output, row);
  each_vector(op.width, [&](int i, auto count) {
    const Floats value = load<Format>(gate + i, count);
    const Floats open = Format::round(quotient(value, 1.f + exponential(-value)));
    store<Format>(output + i, open * load<Format>(up + i, count), count);
  });
}

template <class Format>
void add_scaled_in(void *outputs, const void *update, int32_t width, float scale) {
  auto *sums = static_cast<typename Format::Stored *>(outputs);
  const auto *updates = static_cast<const typename Format::Stored *>(update);
  each_vector(width, [&](int i, auto count) {
    const Floats scaled = Format::round(load<Format>(updates + i, count) * scale);
    store<Format>(sums + i, load<Format>(sums + i, count) + scaled, count);
  });
}

void add_scaled(void *outputs, const void *update, int32_t width, float scale, int32_t dtype) {
  (dtype == OST_BFLOAT16 ? add_scaled_in<BFloat16> : add_scaled_in<Float32>)(outputs, update, width,
                                                                             scale);
}

// One loop over rows for each format, so that a kernel is chosen once per call.
template <class Op, void (*in_bfloat16)(const Op &, int64_t), void (*in_float32)(const Op &, int64_t)>
void each_row(const Op &op, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    op.dtype == OST_BFLOAT16 ? in_bfloat16(op, row) : in_float32(op, row);
}

}  // namespace

namespace ost {

const OpsKernels &OST_OPS() {
  static constexpr OpsKernels kernels = {
      each_row<ost_add_norm, add_norm_row<BFloat16>, add_norm_row<Float32>>,
      each_row<ost_heads, heads_row<BFloat16>, heads_row<Float32>>,
      each_row<ost_gated, gated_row<BFloat16>, gated_row<Float32>>,
      best_rows,
      delta_rows,
      add_scaled,
  };
  return kernels;
}

}  // namespace ost
