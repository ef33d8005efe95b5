// One step of a gated delta rule: the state decays, takes one token, and is read.
//
// A state is a matrix that maps keys to values. It fades, what it says of the token's key is
// corrected towards the token's value, and the query is put to it:
//
//   S = decay * S;   S += key (beta * (value - S^T key))^T;   output = S^T query
//
// Some columns are worked on at a time, so few that the second pass finds them in the first cache:
// memory is read once and written once. Source: gated delta networks, arXiv 2412.06464.
#pragma once

#include <cstdint>

#include "ops/vector.h"

namespace {

// Vectors of columns that are worked on at a time; each has a sum of its own.
constexpr int kDeltaVectors = 4;

// One head of one sequence.
struct DeltaHead {
  float *state;  // (key_dim, value_dim)
  const float *query, *key, *value;
  float *output;
  float decay, beta;
  int key_dim, value_dim;
};

// Columns i.. of a head, kVectors whole vectors, or one of count columns.
template <int kVectors, class Count>
inline void delta_columns(const DeltaHead &head, int i, Count count) {
  Floats recalled[kVectors] = {}, read[kVectors] = {}, change[kVectors];
  const float *row = head.state + i;
  for (int k = 0; k < head.key_dim; ++k, row += head.value_dim)
    for (int v = 0; v < kVectors; ++v)
      recalled[v] = multiply_add(all(head.key[k]), load<Float32>(row + v * kLanes, count), recalled[v]);
  for (int v = 0; v < kVectors; ++v) {
    const Floats value = load<Float32>(head.value + i + v * kLanes, count);
    change[v] = (value - recalled[v] * head.decay) * head.beta;
  }
  float *fading = head.state + i;
  for (int k = 0; k < head.key_dim; ++k, fading += head.value_dim)
    for (int v = 0; v < kVectors; ++v) {
      float *place = fading + v * kLanes;
      const Floats faded = load<Float32>(place, count) * head.decay;
      const Floats now = multiply_add(all(head.key[k]), change[v], faded);
      store<Float32>(place, now, count);
      read[v] = multiply_add(all(head.query[k]), now, read[v]);
    }
  for (int v = 0; v < kVectors; ++v)
    store<Float32>(head.output + i + v * kLanes, read[v], count);
}

inline void delta_head(const DeltaHead &head) {
  constexpr int kWide = kDeltaVectors * kLanes;
  using Whole = std::integral_constant<int, kLanes>;
  int i = 0;
  for (; i + kWide <= head.value_dim; i += kWide) delta_columns<kDeltaVectors>(head, i, Whole{});
  for (; i + kLanes <= head.value_dim; i += kLanes) delta_columns<1>(head, i, Whole{});
  if (i < head.value_dim) delta_columns<1>(head, i, head.value_dim - i);
}

}  // namespace
