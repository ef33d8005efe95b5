// Scans of linear attention: many tokens change a state, and each of them reads it.
//
// A state S is a matrix that maps keys to values. Token i multiplies it by a decay, adds its key times
// a value, and its query reads it. Tokens are taken by chunks of 64, so that nearly all is products of
// matrices. With G_i the sum of the logs of decays from the chunk's first token to token i:
//
//   written_i = beta_i (v_i - e^G_i S^T k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) written_j)
//   output_i  = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) written_j
//   S         = e^G_63 S + sum over j of e^(G_63 - G_j) k_j written_j^T
//
// That is the gated delta rule (arXiv 2412.06464): the sums over j < i are a triangular system, solved
// row by row. Mamba 2 (arXiv 2405.21060) writes beta_i v_i and corrects nothing; beta is its time step.
//
//   unit      a head of a sequence: all of its chunks, one after the other, on one thread
//   scratch   all of a chunk in floats, rows padded with zeros to whole vectors
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/vector.h"
#include "ostinato_ops.h"
#include "threads/scratch.h"

namespace {

constexpr int kChunk = 64;
// Rows and vectors of columns whose sums are in registers at a time.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kScanRows = 8;
#else
constexpr int kScanRows = 4;
#endif
constexpr int kScanVectors = 2;
constexpr float kKeyEpsilon = 1e-6f;

inline int padded(int width) { return (width + 15) / 16 * 16; }

// Rows of floats in scratch, of whole vectors.
struct Panel {
  float *data;
  int stride;
  float *row(int i) const { return data + int64_t{i} * stride; }
  Panel from(int i) const { return {row(i), stride}; }
};

template <int kRows, int kVectors>
inline void product_tile(const Panel &sums, const Panel &left, const Panel &right, int depth, int column) {
  Floats total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) total[r][v] = load<Float32>(sums.row(r) + column + v * kLanes);
  for (int d = 0; d < depth; ++d) {
    Floats next[kVectors];
    for (int v = 0; v < kVectors; ++v) next[v] = load<Float32>(right.row(d) + column + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        total[r][v] = multiply_add(all(left.row(r)[d]), next[v], total[r][v]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store<Float32>(sums.row(r) + column + v * kLanes, total[r][v]);
}

// sums += left right, of so many rows, columns (whole vectors) and numbers along both. A number's sum
// runs along depth in order, wherever it is.
inline void add_product(const Panel &sums, const Panel &left, const Panel &right, int rows, int columns,
                        int depth) {
  const auto each_row_block = [&](auto vectors, int column) {
    int r = 0;
    for (; r + kScanRows <= rows; r += kScanRows)
      product_tile<kScanRows, vectors()>(sums.from(r), left.from(r), right, depth, column);
    for (; r < rows; ++r)
      product_tile<1, vectors()>(sums.from(r), left.from(r), right, depth, column);
  };
  constexpr int kWide = kScanVectors * kLanes;
  int column = 0;
  for (; column + kWide <= columns; column += kWide)
    each_row_block(std::integral_constant<int, kScanVectors>{}, column);
  for (; column < columns; column += kLanes) each_row_block(std::integral_constant<int, 1>{}, column);
}

inline void scale_row(float *row, int columns, float factor) {
  for (int i = 0; i < columns; i += kLanes) store<Float32>(row + i, load<Float32>(row + i) * factor);
}

// What is not a number stays so, where exponential makes a number of it.
inline Floats decay_of(const Floats &log) { return log == log ? exponential(log) : log; }

// log(1 + e^x) as max(x, 0) + log(1 + t), t = e^-|x|, the latter by its series in t / (2 + t), which is
// at most a third.
inline Floats softplus(const Floats &x) {
  const Floats t = exponential(x < 0.f ? x : -x), s = quotient(t, 2.f + t), square = s * s;
  Floats series = all(1.f / 15.f);
  for (int odd = 13; odd > 0; odd -= 2)
    series = multiply_add(series, square, all(1.f / static_cast<float>(odd)));
  return (x < 0.f ? Floats{} : x) + 2.f * s * series;
}

// What one head of one sequence works with.
class ScanHead {
 public:
  ScanHead(const ost_scan &op, int64_t row, const float *skip)
      : op_(op), skip_(skip),
        first_token_(row / op.num_heads * op.num_tokens),
        head_(static_cast<int>(row % op.num_heads)),
        key_head_(head_ / (op.num_heads / op.num_key_heads)),
        stored_(op.states + row * op.key_dim * op.value_dim) {
    const int keys = padded(op.key_dim), values = padded(op.value_dim);
    const int64_t floats = int64_t{kChunk} * (2 * keys + 3 * values + 2 * kChunk) +
                           int64_t{op.key_dim} * (values + kChunk);
    auto *next = static_cast<float *>(ost::thread_scratch(4 * floats));
    const auto panel = [&](int rows, int stride) {
      const Panel panel{next, stride};
      next += int64_t{rows} * stride;
      return panel;
    };
    queries_ = panel(kChunk, keys), keys_ = panel(kChunk, keys);
    values_ = panel(kChunk, values), written_ = panel(kChunk, values);
    outputs_ = panel(kChunk, values);
    by_query_ = panel(kChunk, kChunk), by_key_ = panel(kChunk, kChunk);
    state_ = panel(op.key_dim, values), turned_ = panel(op.key_dim, kChunk);
  }

  void run() {
    copy_state([](float &number, float &stored) { number = stored; });
    for (int first = 0; first < op_.num_tokens; first += kChunk)
      run_chunk(first_token_ + first, std::min(kChunk, op_.num_tokens - first));
    copy_state([](float &number, float &stored) { stored = number; });
  }

 private:
  template <class Copy>
  void copy_state(Copy copy) {
    for (int k = 0; k < op_.key_dim; ++k) {
      float *row = state_.row(k);
      std::fill(row + op_.value_dim, row + state_.stride, 0.f);
      for (int v = 0; v < op_.value_dim; ++v)
        copy(row[v], op_.has_values_first ? stored_[int64_t{v} * op_.key_dim + k]
                                          : stored_[int64_t{k} * op_.value_dim + v]);
    }
  }

  void run_chunk(int64_t token, int count) {
    read(op_.queries, key_head_, op_.key_dim, token, count, queries_);
    read(op_.keys, key_head_, op_.key_dim, token, count, keys_);
    read(op_.values, head_, op_.value_dim, token, count, values_);
    if (op_.has_norms) normalize(queries_, count), normalize(keys_, count);
    for (int k = 0; k < op_.key_dim; ++k)
      for (int i = 0; i < kChunk; ++i) turned_.row(k)[i] = i < count ? keys_.row(i)[k] : 0.f;
    for (int i = 0; i < count; ++i) betas_[i] = op_.betas[(token + i) * op_.gate_stride + head_];
    if (op_.has_steps) make_steps();
    float sum = 0.f;
    for (int i = 0; i < kChunk; ++i) {
      if (i < count)
        sum += op_.has_steps ? op_.gates[head_] * betas_[i] : op_.gates[(token + i) * op_.gate_stride + head_];
      faded_[i] = sum;
    }
    for (int i = 0; i < kChunk; i += kLanes) {
      store<Float32>(decays_ + i, decay_of(load<Float32>(faded_ + i)));
      store<Float32>(rests_ + i, decay_of(all(sum) - load<Float32>(faded_ + i)));
    }
    write(count);
    read_out(token, count);
    for (int k = 0; k < op_.key_dim; ++k) {
      scale_row(state_.row(k), state_.stride, decays_[kChunk - 1]);
      for (int i = 0; i < kChunk; i += kLanes)
        store<Float32>(turned_.row(k) + i, load<Float32>(turned_.row(k) + i) * load<Float32>(rests_ + i));
    }
    add_product(state_, turned_, written_, op_.key_dim, state_.stride, count);
  }

  void make_steps() {
    const bool has_limits = op_.min_step > 0.f || op_.max_step < INFINITY;
    for (int i = 0; i < kChunk; i += kLanes) {
      Floats step = softplus(load<Float32>(betas_ + i));
      if (op_.dtype == OST_BFLOAT16) step = BFloat16::round(step);
      store<Float32>(betas_ + i, has_limits ? clamped(step, op_.min_step, op_.max_step) : step);
    }
  }

  // What each token adds to the state, in written_.
  void write(int count) {
    if (op_.is_delta) {
      clear(written_, count);
      add_product(written_, keys_, state_, count, written_.stride, op_.key_dim);
    }
    for (int i = 0; i < count; ++i) {
      const Floats beta = all(betas_[i]);
      for (int v = 0; v < written_.stride; v += kLanes) {
        Floats value = load<Float32>(values_.row(i) + v);
        if (op_.is_delta) value = value - load<Float32>(written_.row(i) + v) * decays_[i];
        store<Float32>(written_.row(i) + v, value * beta);
      }
    }
    if (!op_.is_delta) return;
    weigh(keys_, by_key_, count);
    for (int i = 0; i < count; ++i) scale_row(by_key_.row(i), kChunk, -betas_[i]);
    for (int first = 0; first < count; first += kScanRows) {
      const int rows = std::min(kScanRows, count - first);
      add_product(written_.from(first), by_key_.from(first), written_, rows, written_.stride, first);
      for (int i = first + 1; i < first + rows; ++i)
        add_product(written_.from(i), {by_key_.row(i) + first, kChunk}, written_.from(first), 1,
                    written_.stride, i - first);
    }
  }

  void read_out(int64_t token, int count) {
    for (int i = 0; i < count; ++i) scale_row(queries_.row(i), queries_.stride, op_.query_scale);
    weigh(queries_, by_query_, count);
    clear(outputs_, count);
    add_product(outputs_, queries_, state_, count, outputs_.stride, op_.key_dim);
    const Floats skip = all(skip_ == nullptr ? 0.f : *skip_);
    for (int first = 0; first < count; first += kScanRows) {
      const int rows = std::min(kScanRows, count - first);
      for (int i = first; i < first + rows; ++i) scale_row(outputs_.row(i), outputs_.stride, decays_[i]);
      add_product(outputs_.from(first), by_query_.from(first), written_, rows, outputs_.stride,
                  first + rows);
    }
    for (int i = 0; i < count; ++i) {
      const int64_t place = (token + i) * op_.outputs.stride + int64_t{head_} * op_.value_dim;
      each_vector(op_.value_dim, [&](int v, auto lanes) {
        Floats output = load<Float32>(outputs_.row(i) + v);
        if (skip_ != nullptr) output = multiply_add(skip, load<Float32>(values_.row(i) + v), output);
        if (op_.output_dtype == OST_BFLOAT16)
          store<BFloat16>(static_cast<uint16_t *>(op_.outputs.data) + place + v, output, lanes);
        else
          store<Float32>(static_cast<float *>(op_.outputs.data) + place + v, output, lanes);
      });
    }
  }

  // What earlier tokens of the chunk, and the token itself, weigh for a row: the products with their
  // keys, faded; those of later tokens weigh nothing.
  void weigh(const Panel &rows, const Panel &weights, int count) {
    clear(weights, count);
    for (int first = 0; first < count; first += kScanRows) {
      const int last = std::min(first + kScanRows, count);
      add_product(weights.from(first), rows.from(first), turned_, last - first, padded(last), op_.key_dim);
      for (int i = first; i < last; ++i) {
        for (int j = 0; j <= i; j += kLanes) {
          const Floats decay = exponential(all(faded_[i]) - load<Float32>(faded_ + j));
          store<Float32>(weights.row(i) + j, load<Float32>(weights.row(i) + j) * decay);
        }
        std::fill(weights.row(i) + i + 1, weights.row(i) + kChunk, 0.f);
      }
    }
  }

  // Rows of one head, in floats.
  void read(const ost_matrix &from, int head, int width, int64_t token, int count, const Panel &to) {
    for (int i = 0; i < count; ++i) {
      const int64_t place = (token + i) * from.stride + int64_t{head} * width;
      float *row = to.row(i);
      std::fill(row + width, row + to.stride, 0.f);
      each_vector(width, [&](int k, auto lanes) {
        const Floats numbers =
            op_.dtype == OST_BFLOAT16
                ? load<BFloat16>(static_cast<const uint16_t *>(from.data) + place + k, lanes)
                : load<Float32>(static_cast<const float *>(from.data) + place + k, lanes);
        store<Float32>(row + k, numbers, lanes);
      });
    }
  }

  void normalize(const Panel &rows, int count) {
    for (int i = 0; i < count; ++i) {
      RowSum squares;
      squares.over(
          rows.stride, [&](int k, auto lanes) { return load<Float32>(rows.row(i) + k, lanes); },
          [](const Floats &sum, const Floats &next) { return multiply_add(next, next, sum); });
      scale_row(rows.row(i), rows.stride, 1.f / std::sqrt(squares.total() + kKeyEpsilon));
    }
  }

  static void clear(const Panel &panel, int rows) { std::fill(panel.data, panel.row(rows), 0.f); }

  const ost_scan &op_;
  const float *const skip_;  // what outputs get of their values too; may be null
  const int64_t first_token_;
  const int head_, key_head_;
  float *const stored_;
  Panel queries_, keys_, values_, written_, outputs_, by_query_, by_key_, state_, turned_;
  // Sums of logs of decays to each token, and the decays to it and from it to the chunk's end.
  alignas(64) float faded_[kChunk], decays_[kChunk], rests_[kChunk];
  alignas(64) float betas_[kChunk] = {};
};

inline void scan_rows(const ost_scan &op, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    ScanHead(op, row, op.skips == nullptr ? nullptr : op.skips + row % op.num_heads).run();
}

// A row is a token: weighted sums of it and the tokens before, channel by channel.
template <class Format>
void convolve_rows(const ost_convolution &op, int64_t first, int64_t last) {
  using Stored = typename Format::Stored;
  constexpr int kMaxTaps = 16;
  const Stored *taps[kMaxTaps];
  const int num_earlier = op.num_taps - 1;
  for (int64_t row = first; row < last; ++row) {
    const int64_t sequence = row / op.num_tokens, token = row % op.num_tokens;
    for (int tap = 0; tap < op.num_taps; ++tap) {
      const int64_t at = token + tap - num_earlier;
      taps[tap] =
          at >= 0
              ? static_cast<const Stored *>(op.inputs.data) + (row - token + at) * op.inputs.stride
              : static_cast<const Stored *>(op.earlier) +
                    (sequence * num_earlier + at + num_earlier) * op.width;
    }
    Stored *output = static_cast<Stored *>(op.outputs.data) + row * op.outputs.stride;
    each_vector(op.width, [&](int i, auto count) {
      Floats sum{};
      for (int tap = 0; tap < op.num_taps; ++tap)
        sum = multiply_add(load<Format>(taps[tap] + i, count),
                           load<Float32>(op.weights + int64_t{tap} * op.width + i, count), sum);
      if (op.bias != nullptr) sum = sum + load<Float32>(op.bias + i, count);
      sum = Format::round(sum);
      store<Format>(output + i, op.has_silu ? silu(sum) : sum, count);
    });
  }
}

}  // namespace
