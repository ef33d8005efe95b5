// Mixers of linear attention: the rows of a step, whose sequences have states of their own.
//
//   projected row ─► convolution of each channel ─► queries, keys, values ─┐
//   stepped row   ─► decays and betas of each head ────────────────────────┴► scan of each head ─► output
//
// The first work takes a run of a sequence's channels through all of its tokens, and leaves its last
// inputs for the next step; the second takes a head through them. A sequence of one token that continues
// one is a step: states are read and written once. What a sequence gets does not depend on the others.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/delta.h"
#include "ops/scan.h"
#include "ops/vector.h"
#include "ostinato_ops.h"
#include "threads/scratch.h"

namespace {

constexpr int kMaxTaps = 16;
constexpr int kMaxChannels = 256;  // of a run

// One sequence of a step.
struct SequenceRows {
  int64_t first, count, slot;
  bool is_fresh;
  SequenceRows(const ost_sequences &step, int64_t i)
      : first(step.starts[i]), count(step.starts[i + 1] - first), slot(step.slots[i]),
        is_fresh(step.is_fresh[i] != 0) {}
};

template <class Stored>
Stored *numbers_of(const ost_matrix &matrix, int64_t row, int64_t column) {
  return static_cast<Stored *>(matrix.data) + row * matrix.stride + column;
}

template <class Count>
Floats load_as(int32_t dtype, const void *numbers, int64_t i, Count count) {
  if (dtype == OST_BFLOAT16) return load<BFloat16>(static_cast<const uint16_t *>(numbers) + i, count);
  return load<Float32>(static_cast<const float *>(numbers) + i, count);
}

// What one run of channels works with, turned so that channels are side by side.
template <class Format>
class RunOfChannels {
  using Stored = typename Format::Stored;

 public:
  RunOfChannels(const ost_mixer &op, const ost_channels &run, const SequenceRows &rows)
      : op_(op), run_(run), rows_(rows), num_earlier_(op.num_taps - 1),
        kept_(static_cast<Stored *>(op.earlier) +
              (rows.slot * op.num_channels + run.channel) * num_earlier_) {
    const auto *weights = static_cast<const Stored *>(op.weights) + int64_t{run.channel} * op.num_taps;
    for (int tap = 0; tap < op.num_taps; ++tap)
      for (int i = 0; i < run.width; ++i) {
        weights_[tap][i] = weights[i * op.num_taps + tap];
        if (tap < num_earlier_) earlier_[tap][i] = rows.is_fresh ? Stored{} : kept_[i * num_earlier_ + tap];
      }
  }

  void run() {
    for (int64_t token = 0; token < rows_.count; ++token) convolve(token);
    for (int tap = 0; tap < num_earlier_; ++tap) {
      const Stored *input = input_at(rows_.count - num_earlier_ + tap);
      for (int i = 0; i < run_.width; ++i) kept_[i * num_earlier_ + tap] = input[i];
    }
  }

 private:
  const Stored *input_at(int64_t token) const {
    if (token < 0) return earlier_[token + num_earlier_];
    return numbers_of<Stored>(op_.projected, rows_.first + token, run_.column);
  }

  void convolve(int64_t token) const {
    const Stored *taps[kMaxTaps];
    for (int tap = 0; tap < op_.num_taps; ++tap) taps[tap] = input_at(token - num_earlier_ + tap);
    auto *output = numbers_of<Stored>(op_.convolved, rows_.first + token, run_.channel);
    const auto *bias = static_cast<const Stored *>(op_.bias);
    each_vector(run_.width, [&](int i, auto count) {
      Floats sum{};
      for (int tap = 0; tap < op_.num_taps; ++tap)
        sum = multiply_add(load<Format>(taps[tap] + i, count), load<Format>(weights_[tap] + i, count), sum);
      if (bias != nullptr) sum = sum + load<Format>(bias + run_.channel + i, count);
      sum = Format::round(sum);
      store<Format>(output + i, op_.has_silu ? silu(sum) : sum, count);
    });
  }

  const ost_mixer &op_;
  const ost_channels &run_;
  const SequenceRows &rows_;
  const int num_earlier_;
  Stored *const kept_;
  alignas(64) Stored weights_[kMaxTaps][kMaxChannels], earlier_[kMaxTaps][kMaxChannels];
};

// The logs of decays and the betas of a sequence's tokens, vectors of heads at a time. What is not a
// number stays so.
template <class Format>
void gate_sequence(const ost_mixer &op, const SequenceRows &rows) {
  using Stored = typename Format::Stored;
  const ost_scan &scan = op.scan;
  const bool has_limits = scan.min_step > 0.f || scan.max_step < INFINITY;
  const auto gather = [&](const int32_t *columns, int64_t row, int i, int count) {
    Stored numbers[kLanes] = {};
    for (int lane = 0; lane < count; ++lane)
      numbers[lane] = *numbers_of<Stored>(op.stepped, row, columns[i + lane]);
    return load<Format>(numbers);
  };
  each_vector(scan.num_heads, [&](int i, auto count) {
    const Floats rates = -exponential(load_as(op.rates_dtype, op.log_rates, i, count));
    Floats shifts = load_as(op.shifts_dtype, op.shifts, i, count);
    if (!scan.is_delta) shifts = Format::round(shifts);
    for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
      const int64_t place = row * scan.gate_stride + i;
      const Floats raw = gather(op.decay_columns, row, i, count) + shifts;
      Floats step = scan.is_delta ? softplus(raw) : Format::round(softplus(Format::round(raw)));
      if (!scan.is_delta && has_limits) step = clamped(step, scan.min_step, scan.max_step);
      step = raw == raw ? step : raw;
      store<Float32>(const_cast<float *>(scan.gates) + place, rates * step, count);
      Floats beta = step;
      if (scan.is_delta) {
        const Floats column = gather(op.beta_columns, row, i, count);
        beta = Format::round(quotient(all(1.f), 1.f + exponential(-column))) * op.beta_factor;
        beta = column == column ? beta : column;
      }
      store<Float32>(const_cast<float *>(scan.betas) + place, beta, count);
    }
  });
}

template <class Format>
void convolve_sequences(const ost_mixer &op, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; ++unit) {
    const SequenceRows rows(*op.step, unit / (op.num_runs + 1));
    const int64_t run = unit % (op.num_runs + 1);
    if (run == op.num_runs)
      gate_sequence<Format>(op, rows);
    else
      RunOfChannels<Format>(op, op.channels[run], rows).run();
  }
}

// A step of Mamba 2, whose states have values first: each row fades, gets a share of the key and is read.
inline void mamba_head(const DeltaHead &head, float skip) {
  for (int v = 0; v < head.value_dim; ++v) {
    float *state = head.state + int64_t{v} * head.key_dim;
    const float share = head.beta * head.value[v];
    RowSum sum;
    sum.over(
        head.key_dim,
        [&](int k, auto count) {
          const Floats faded = load<Float32>(state + k, count) * head.decay;
          const Floats now = multiply_add(all(share), load<Float32>(head.key + k, count), faded);
          store<Float32>(state + k, now, count);
          return now * load<Float32>(head.query + k, count);
        },
        [](const Floats &before, const Floats &next) { return before + next; });
    head.output[v] = sum.total() + skip * head.value[v];
  }
}

// The step of one head: a row of each matrix, in floats.
template <class Format>
void step_head(const ost_scan &scan, int head, float *states, float skip) {
  using Stored = typename Format::Stored;
  const int keys = padded(scan.key_dim), values = padded(scan.value_dim);
  auto *query = static_cast<float *>(ost::thread_scratch(4 * int64_t{2 * keys + 2 * values}));
  float *key = query + keys, *value = key + keys, *output = value + values;
  const int key_head = head / (scan.num_heads / scan.num_key_heads);
  const auto read = [](const ost_matrix &from, int place, int width, float *to) {
    each_vector(width, [&](int i, auto count) {
      store<Float32>(to + i, load<Format>(numbers_of<Stored>(from, 0, int64_t{place} * width) + i, count),
                     count);
    });
  };
  const auto scale = [&](float *row, float factor) {
    RowSum squares;
    squares.over(
        scan.key_dim, [&](int i, auto count) { return load<Float32>(row + i, count); },
        [](const Floats &sum, const Floats &next) { return multiply_add(next, next, sum); });
    if (scan.has_norms) factor *= 1.f / std::sqrt(squares.total() + kKeyEpsilon);
    each_vector(scan.key_dim, [&](int i, auto count) {
      store<Float32>(row + i, load<Float32>(row + i, count) * factor, count);
    });
  };
  read(scan.queries, key_head, scan.key_dim, query), read(scan.keys, key_head, scan.key_dim, key);
  read(scan.values, head, scan.value_dim, value);
  scale(query, scan.query_scale), scale(key, 1.f);
  const float decay = decay_of(all(scan.gates[head]))[0];
  const DeltaHead own{states, query, key, value, output, decay, scan.betas[head], scan.key_dim, scan.value_dim};
  scan.is_delta ? delta_head(own) : mamba_head(own, skip);
  each_vector(scan.value_dim, [&](int i, auto count) {
    const Floats numbers = load<Float32>(output + i, count);
    const int64_t place = int64_t{head} * scan.value_dim + i;
    if (scan.output_dtype == OST_BFLOAT16)
      store<BFloat16>(numbers_of<uint16_t>(scan.outputs, 0, place), numbers, count);
    else
      store<Float32>(numbers_of<float>(scan.outputs, 0, place), numbers, count);
  });
}

template <class Format>
void scan_sequences(const ost_mixer &op, int64_t first, int64_t last) {
  using Stored = typename Format::Stored;
  for (int64_t unit = first; unit < last; ++unit) {
    const SequenceRows rows(*op.step, unit / op.scan.num_heads);
    const int head = static_cast<int>(unit % op.scan.num_heads);
    ost_scan scan = op.scan;
    const int64_t head_size = int64_t{scan.key_dim} * scan.value_dim;
    scan.states += rows.slot * scan.num_heads * head_size;
    scan.num_tokens = static_cast<int32_t>(rows.count);
    for (ost_matrix *matrix : {&scan.queries, &scan.keys, &scan.values})
      matrix->data = numbers_of<Stored>(*matrix, rows.first, 0);
    scan.outputs.data = scan.output_dtype == OST_BFLOAT16
                            ? static_cast<void *>(numbers_of<uint16_t>(scan.outputs, rows.first, 0))
                            : static_cast<void *>(numbers_of<float>(scan.outputs, rows.first, 0));
    scan.gates += rows.first * scan.gate_stride, scan.betas += rows.first * scan.gate_stride;
    float skip = 0.f;
    if (op.skips != nullptr) skip = load_as(op.skips_dtype, op.skips, head, 1)[0];
    float *states = scan.states + head * head_size;
    if (rows.is_fresh) std::fill(states, states + head_size, 0.f);
    if (rows.count == 1 && !rows.is_fresh) {
      step_head<Format>(scan, head, states, skip);
      continue;
    }
    ScanHead(scan, head, op.skips == nullptr ? nullptr : &skip).run();
  }
}

}  // namespace
