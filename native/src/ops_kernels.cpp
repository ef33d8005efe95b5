// How is what lies between products computed, with one instruction set?
//
// Compiled once for each; OST_OPS is the function that hands the kernels out. Rounding follows
// transformers: a norm rounds before its weight, RoPE each product, the gate before it multiplies.
#include "ops_kernels.h"

#include <cmath>

#include "ops_vector.h"

namespace {

inline int lanes_left(int done, int total) { return total - done < kLanes ? total - done : kLanes; }

template <class Format>
typename Format::Stored *row_of(const ost_matrix &matrix, int64_t row) {
  return static_cast<typename Format::Stored *>(matrix.data) + row * matrix.stride;
}

// Rows that are normed: out = round(x * factor) * weight.
template <class Format>
inline Floats weighed(const Floats &value, float factor, const Floats &weight) {
  return Format::round(value * factor) * weight;
}

inline float norm_factor(const Floats &squares, int width, float epsilon) {
  return 1.f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
}

template <class Format>
void add_norm_row(const ost_add_norm &op, int64_t row) {
  auto *residual = row_of<Format>(op.residual, row);
  Floats squares{};
  for (int i = 0; i < op.width; i += kLanes) {
    const int count = lanes_left(i, op.width);
    Floats value = load<Format>(residual + i, count);
    if (op.addend.data != nullptr) {
      value = Format::round(value + load<Format>(row_of<Format>(op.addend, row) + i, count));
      store<Format>(residual + i, value, count);
    }
    squares += value * value;
  }
  const float factor = norm_factor(squares, op.width, op.epsilon);
  const auto *weight = static_cast<const typename Format::Stored *>(op.weight);
  auto *output = row_of<Format>(op.output, row);
  for (int i = 0; i < op.width; i += kLanes) {
    const int count = lanes_left(i, op.width);
    const Floats value = load<Format>(residual + i, count);
    store<Format>(output + i, weighed<Format>(value, factor, load<Format>(weight + i, count)), count);
  }
}

template <class Format>
struct Head {
  using Stored = typename Format::Stored;
  const Stored *weight;  // null: not normed
  const Stored *cosines;
  const Stored *sines;
  int dim;
  float epsilon;

  float factor(const Stored *from) const {
    Floats squares{};
    for (int i = 0; i < dim; i += kLanes) {
      const Floats value = load<Format>(from + i, lanes_left(i, dim));
      squares += value * value;
    }
    return norm_factor(squares, dim, epsilon);
  }

  Floats normed(const Stored *from, int i, int count, float factor) const {
    const Floats value = load<Format>(from + i, count);
    if (weight == nullptr) return value;
    return Format::round(weighed<Format>(value, factor, load<Format>(weight + i, count)));
  }

  // Turn number i of each half: (first, second) times (cos, sin), each product rounded.
  void turn(const Stored *from, Stored *to) const {
    const int half = dim / 2;
    const float scale = weight == nullptr ? 1.f : factor(from);
    for (int i = 0; i < half; i += kLanes) {
      const int count = lanes_left(i, half);
      const Floats first = normed(from, i, count, scale);
      const Floats second = normed(from, half + i, count, scale);
      const auto times = [&](const Floats &value, const Stored *table, int at) {
        return Format::round(value * load<Format>(table + at, count));
      };
      store<Format>(to + i, times(first, cosines, i) - times(second, sines, i), count);
      store<Format>(to + half + i,
                    times(second, cosines, half + i) + times(first, sines, half + i), count);
    }
  }
};

template <class Format>
void heads_row(const ost_heads &op, int64_t row) {
  using Stored = typename Format::Stored;
  const Stored *from = row_of<Format>(op.projected, row);
  Head<Format> head{static_cast<const Stored *>(op.query_weight), row_of<Format>(op.cosines, row),
                    row_of<Format>(op.sines, row), op.head_dim, op.epsilon};
  Stored *queries = row_of<Format>(op.queries, row), *keys = row_of<Format>(op.keys, row);
  for (int i = 0; i < op.num_heads; ++i, from += op.head_dim, queries += op.head_dim)
    head.turn(from, queries);
  head.weight = static_cast<const Stored *>(op.key_weight);
  for (int i = 0; i < op.num_kv_heads; ++i, from += op.head_dim, keys += op.head_dim)
    head.turn(from, keys);
  const size_t num_bytes = sizeof(Stored) * static_cast<size_t>(op.num_kv_heads) *
                           static_cast<size_t>(op.head_dim);
  std::memcpy(row_of<Format>(op.values, row), from, num_bytes);
}

template <class Format>
void gated_row(const ost_gated &op, int64_t row) {
  const auto *gate = row_of<Format>(op.gate_up, row);
  const auto *up = gate + op.width;
  auto *output = row_of<Format>(op.output, row);
  for (int i = 0; i < op.width; i += kLanes) {
    const int count = lanes_left(i, op.width);
    const Floats value = load<Format>(gate + i, count);
    const Floats open = Format::round(value / (1.f + exponential(-value)));
    store<Format>(output + i, open * load<Format>(up + i, count), count);
  }
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
  };
  return kernels;
}

}  // namespace ost
