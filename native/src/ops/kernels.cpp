// The operations between products, compiled once for each instruction set.
//
// Compiled once for each; OST_OPS is the function that hands the kernels out. Rounding follows
// transformers: a norm rounds before its weight, RoPE each product, the gate before it multiplies.
#include "ops/kernels.h"

#include <cmath>

#include "ops/argmax.h"
#include "ops/mixer.h"
#include "ops/scan.h"
#include "ops/vector.h"

namespace {

// Heads whose norms are worked out before the first of them is turned.
constexpr int kHeadsAtATime = 16;

template <class Format>
typename Format::Stored *row_of(const ost_matrix &matrix, int64_t row) {
  return static_cast<typename Format::Stored *>(matrix.data) + row * matrix.stride;
}

// The sum of squares of a row.
struct Squares {
  RowSum sum;
  template <class Value>
  void over(int width, Value value) {
    sum.over(width, value, [](const Floats &squares, const Floats &next) {
      return multiply_add(next, next, squares);
    });
  }
  float norm_factor(int width, float epsilon) const {
    return 1.f / std::sqrt(sum.total() / static_cast<float>(width) + epsilon);
  }
};

// What a norm makes of the numbers of one row, of which it has seen all.
struct Scale {
  float center = 0.f, factor = 1.f;
};

// value(i, count) gives numbers i .. i + count - 1.
template <class Value>
Scale scale_of(const ost_norm &norm, int width, Value value) {
  Scale scale;
  if (norm.kind == OST_LAYER_NORM) {
    RowSum sum;
    sum.over(width, value, [](const Floats &numbers, const Floats &next) { return numbers + next; });
    scale.center = sum.total() / static_cast<float>(width);
  }
  Squares squares;
  squares.over(width, [&](int i, auto count) {
    Floats centered = value(i, count);
    if (norm.kind == OST_LAYER_NORM) {
      centered = centered - scale.center;
      for (int lane = count; lane < kLanes; ++lane) centered[lane] = 0.f;
    }
    return centered;
  });
  scale.factor = squares.norm_factor(width, norm.epsilon);
  return scale;
}

// Weights of a norm, read where they lie.
template <class Format>
struct Weights {
  using Stored = typename Format::Stored;
  const Stored *weight, *bias;
  float offset;
  bool is_rounded;

  explicit Weights(const ost_norm &norm, int64_t first = 0)
      : weight(at(norm.weight, first)), bias(at(norm.bias, first)), offset(norm.offset),
        is_rounded(norm.is_rounded != 0) {}

  template <class Count>
  Floats weights(int i, Count count) const {
    return weight == nullptr ? all(1.f) : load<Format>(weight + i, count) + offset;
  }
  static Floats weighed(const Floats &value, const Scale &scale, const Floats &weights,
                        bool is_rounded) {
    const Floats normed = (value - scale.center) * scale.factor;
    return (is_rounded ? Format::round(normed) : normed) * weights;
  }
  template <class Count>
  Floats normed(const Floats &value, const Scale &scale, int i, Count count) const {
    const Floats normed = weighed(value, scale, weights(i, count), is_rounded);
    return bias == nullptr ? normed : normed + load<Format>(bias + i, count);
  }

 private:
  static const Stored *at(const void *numbers, int64_t first) {
    return numbers == nullptr ? nullptr : static_cast<const Stored *>(numbers) + first;
  }
};

// Row to's numbers are those of from, normed.
template <class Format>
void norm_row(const ost_norm &norm, const typename Format::Stored *from,
              typename Format::Stored *to, int width, int64_t first_weight, const Scale &scale) {
  const Weights<Format> weights(norm, first_weight);
  each_vector(width, [&](int i, auto count) {
    store<Format>(to + i, weights.normed(load<Format>(from + i, count), scale, i, count), count);
  });
}

template <class Format>
Scale scale_of_row(const ost_norm &norm, const typename Format::Stored *row, int width) {
  return scale_of(norm, width, [&](int i, auto count) { return load<Format>(row + i, count); });
}

// The sigmoid of a row's gate; 1 if there is none.
template <class Format>
float opening(const ost_matrix &gates, int64_t row) {
  if (gates.data == nullptr) return 1.f;
  const Floats gate = load<Format>(row_of<Format>(gates, row), 1);
  const Floats open = Format::round(quotient(all(1.f), 1.f + exponential(-gate)));
  return gate[0] == gate[0] ? open[0] : gate[0];
}

// residual += scale * sigmoid(gate) * normed(addend); the squares of the sums.
template <class Format>
Squares add_row(const ost_add_norm &op, int64_t row) {
  auto *residual = row_of<Format>(op.residual, row);
  const auto *addend = row_of<Format>(op.addend, row);
  const bool is_normed = op.addend_norm.kind != OST_NO_NORM;
  const Scale scale =
      is_normed ? scale_of_row<Format>(op.addend_norm, addend, op.width) : Scale{};
  const Weights<Format> weights(op.addend_norm);
  const float open = opening<Format>(op.gates, row);
  Squares squares;
  squares.over(op.width, [&](int i, auto count) {
    Floats value = load<Format>(addend + i, count);
    if (is_normed) value = Format::round(weights.normed(value, scale, i, count));
    if (open != 1.f) value = Format::round(value * open);
    if (op.scale != 1.f) value = Format::round(value * op.scale);
    value = Format::round(load<Format>(residual + i, count) + value);
    store<Format>(residual + i, value, count);
    return value;
  });
  return squares;
}

template <class Format>
void add_norm_row(const ost_add_norm &op, int64_t row) {
  const auto *residual = row_of<Format>(op.residual, row);
  Scale scale;
  if (op.addend.data != nullptr) {
    const Squares squares = add_row<Format>(op, row);
    scale.factor = squares.norm_factor(op.width, op.norm.epsilon);
  }
  if (op.output.data == nullptr) return;
  if (op.addend.data == nullptr || op.norm.kind != OST_RMS_NORM)
    scale = scale_of_row<Format>(op.norm, residual, op.width);
  norm_row<Format>(op.norm, residual, row_of<Format>(op.output, row), op.width, 0, scale);
}

// Heads of one row that are normed and turned alike.
template <class Format>
struct Heads {
  using Stored = typename Format::Stored;
  const ost_heads &op;
  const ost_norm &norm;
  const float *cosines;
  const float *sines;

  Heads(const ost_heads &heads, const ost_norm &own, int64_t row)
      : op(heads), norm(own),
        cosines(static_cast<const float *>(heads.angles.data) + row * heads.angles.stride),
        sines(cosines + heads.rotary_dim / 2) {}

  void turn(const Stored *from, int stride, Stored *to, int num_heads) const {
    if (!is_usual()) return turn_unusual(from, stride, to, num_heads);
    for (int done = 0; done < num_heads; done += kHeadsAtATime) {
      const int left = num_heads - done;
      turn_some(from + done * stride, stride, to + done * op.head_dim,
                left < kHeadsAtATime ? left : kHeadsAtATime);
    }
  }

 private:
  // Whole heads in halves, whose weights and angles are widened once for several heads.
  bool is_usual() const {
    return op.rope == OST_HALVES && op.rotary_dim == op.head_dim && !op.is_norm_last &&
           !op.is_norm_of_all && op.weight_stride == 0 && norm.bias == nullptr &&
           (norm.kind == OST_NO_NORM || (norm.kind == OST_RMS_NORM && norm.weight != nullptr));
  }

  void turn_some(const Stored *from, int stride, Stored *to, int num_heads) const {
    Scale scales[kHeadsAtATime];
    const bool is_normed = norm.kind != OST_NO_NORM;
    for (int head = 0; is_normed && head < num_heads; ++head)
      scales[head] = scale_of_row<Format>(norm, from + head * stride, op.head_dim);
    each_vector(op.head_dim / 2, [&](int i, auto count) {
      is_normed ? turn_part<true>(from + i, stride, to + i, num_heads, scales, i, count)
                : turn_part<false>(from + i, stride, to + i, num_heads, scales, i, count);
    });
  }

  // Numbers i.. of each half: (first, second) times (cos, sin).
  template <bool kNormed, class Count>
  void turn_part(const Stored *from, int stride, Stored *to, int num_heads, const Scale *scales,
                 int i, Count count) const {
    const int half = op.head_dim / 2;
    const Floats cosine = load<Float32>(cosines + i, count), sine = load<Float32>(sines + i, count);
    const Weights<Format> weights(norm);
    const Floats first_weight = kNormed ? weights.weights(i, count) : Floats{};
    const Floats second_weight = kNormed ? weights.weights(half + i, count) : Floats{};
    for (int head = 0; head < num_heads; ++head, from += stride, to += op.head_dim) {
      Floats first = load<Format>(from, count), second = load<Format>(from + half, count);
      if constexpr (kNormed) {
        first = Format::round(
            Weights<Format>::weighed(first, scales[head], first_weight, weights.is_rounded));
        second = Format::round(
            Weights<Format>::weighed(second, scales[head], second_weight, weights.is_rounded));
      }
      store<Format>(to, product(first, cosine) - product(second, sine), count);
      store<Format>(to + half, product(second, cosine) + product(first, sine), count);
    }
  }

  Floats product(const Floats &a, const Floats &b) const {
    return op.are_rounded ? Format::round(a * b) : a * b;
  }

  void turn_unusual(const Stored *from, int stride, Stored *to, int num_heads) const {
    const int dim = op.head_dim;
    for (int head = 0; head < num_heads; ++head)
      std::memcpy(to + head * dim, from + head * stride, sizeof(Stored) * static_cast<size_t>(dim));
    if (!op.is_norm_last) norm_heads(to, num_heads);
    if (op.rope != OST_NO_ROPE)
      for (int head = 0; head < num_heads; ++head) turn_pairs(to + head * dim);
    if (op.is_norm_last) norm_heads(to, num_heads);
  }

  void norm_heads(Stored *heads, int num_heads) const {
    if (norm.kind == OST_NO_NORM) return;
    const int num_rows = op.is_norm_of_all ? 1 : num_heads;
    const int width = op.is_norm_of_all ? num_heads * op.head_dim : op.head_dim;
    for (int row = 0; row < num_rows; ++row) {
      Stored *const numbers = heads + row * width;
      norm_row<Format>(norm, numbers, numbers, width, int64_t{row} * op.weight_stride,
                       scale_of_row<Format>(norm, numbers, width));
    }
  }

  void turn_pairs(Stored *head) const {
    const int half = op.rotary_dim / 2;
    const int apart = op.rope == OST_HALVES ? half : 1, step = op.rope == OST_HALVES ? 1 : 2;
    for (int pair = 0; pair < half; ++pair) {
      Stored *const numbers = head + pair * step;
      const Floats first = load<Format>(numbers, 1), second = load<Format>(numbers + apart, 1);
      const Floats cosine = all(cosines[pair]), sine = all(sines[pair]);
      store<Format>(numbers, product(first, cosine) - product(second, sine), 1);
      store<Format>(numbers + apart, product(second, cosine) + product(first, sine), 1);
    }
  }
};

template <class Format>
void heads_row(const ost_heads &op, int64_t row) {
  using Stored = typename Format::Stored;
  const Stored *from = row_of<Format>(op.projected, row);
  Heads<Format>(op, op.query_norm, row)
      .turn(from, op.query_stride, row_of<Format>(op.queries, row), op.num_heads);
  Heads<Format>(op, op.key_norm, row)
      .turn(from + op.key_offset, op.kv_stride, row_of<Format>(op.keys, row), op.num_kv_heads);
  Stored *values = row_of<Format>(op.values, row);
  for (int head = 0; head < op.num_kv_heads; ++head)
    std::memcpy(values + head * op.head_dim, from + op.value_offset + head * op.kv_stride,
                sizeof(Stored) * static_cast<size_t>(op.head_dim));
}

// A group's numbers are gated before its norm, or after it; without a norm it is the same.
template <class Input, class Format>
void gated_norm_row(const ost_gated_norm &op, int64_t row) {
  auto *held = static_cast<float *>(ost::thread_scratch(4 * int64_t{op.width}));
  const bool is_normed = op.norm.kind != OST_NO_NORM;
  for (int group = 0; group < op.num_groups; ++group) {
    const int64_t first = int64_t{group} * op.width;
    const auto *from = row_of<Input>(op.inputs, row) + first;
    const auto *gates = row_of<Format>(op.gates, row) + op.columns[group];
    const auto *weights = static_cast<const typename Format::Stored *>(op.norm.weight);
    if (weights != nullptr) weights += int64_t{group} * op.weight_stride;
    auto *to = row_of<Format>(op.output, row) + first;
    const auto opened = [&](int i, auto count, const Floats &value) {
      const Floats gate = load<Format>(gates + i, count);
      if (op.is_sigmoid) return value * Format::round(quotient(all(1.f), 1.f + exponential(-gate)));
      return value * silu(gate);
    };
    Scale scale;
    if (is_normed)
      scale = scale_of(op.norm, op.width, [&](int i, auto count) {
        Floats value = load<Input>(from + i, count);
        if (op.is_gated_first) value = opened(i, count, value);
        std::memcpy(held + i, &value, sizeof(float) * static_cast<size_t>(int{count}));
        return value;
      });
    each_vector(op.width, [&](int i, auto count) {
      Floats value = is_normed ? load<Float32>(held + i, count) : load<Input>(from + i, count);
      if (is_normed) {
        value = Input::round(value * scale.factor);
        if (weights != nullptr) value = Input::round(value * load<Format>(weights + i, count));
      }
      store<Format>(to + i, is_normed && op.is_gated_first ? value : opened(i, count, value), count);
    });
  }
}

inline Floats activated(int32_t activation, const Floats &x) {
  switch (activation) {
    case OST_GELU:
      return gelu_by_erf(x);
    case OST_GELU_TANH:
      return gelu_by_tanh(x);
    case OST_RELU:
      return x > 0.f ? x : x * 0.f;
    case OST_RELU_SQUARED:
      return x > 0.f ? x * x : x * 0.f;
    default:
      return silu(x);
  }
}

template <class Format>
void gated_row(const ost_gated &op, int64_t row) {
  const auto *gate = row_of<Format>(op.gate_up, row);
  const auto *up = gate + op.width;
  auto *output = row_of<Format>(op.output, row);
  each_vector(op.width, [&](int i, auto count) {
    const Floats open = activated(op.activation, load<Format>(gate + i, count));
    store<Format>(output + i,
                  op.has_up ? Format::round(open) * load<Format>(up + i, count) : open, count);
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
      scan_rows,
      [](const ost_convolution &op, int64_t first, int64_t last) {
        (op.dtype == OST_BFLOAT16 ? convolve_rows<BFloat16> : convolve_rows<Float32>)(op, first, last);
      },
      [](const ost_gated_norm &op, int64_t first, int64_t last) {
        if (op.input_dtype == op.dtype)
          each_row<ost_gated_norm, gated_norm_row<BFloat16, BFloat16>, gated_norm_row<Float32, Float32>>(
              op, first, last);
        else
          for (int64_t row = first; row < last; ++row) gated_norm_row<Float32, BFloat16>(op, row);
      },
      [](const ost_mixer &op, int64_t first, int64_t last) {
        (op.scan.dtype == OST_BFLOAT16 ? convolve_sequences<BFloat16> : convolve_sequences<Float32>)(
            op, first, last);
      },
      [](const ost_mixer &op, int64_t first, int64_t last) {
        (op.scan.dtype == OST_BFLOAT16 ? scan_sequences<BFloat16> : scan_sequences<Float32>)(
            op, first, last);
      },
      add_scaled,
  };
  return kernels;
}

}  // namespace ost
