// How are low-rank updates of adapters added to a product?
//
// Rows of one adapter are taken four at a time, so that each number of its weights is read and
// widened once for them; what is summed into a row, and in which order, is the same for one row.
#pragma once

#include <cstdint>

#include "ops_vector.h"
#include "ostinato_ops.h"

namespace {

// Ranks whose sums are made together: enough additions that need not wait for each other.
constexpr int kRanks = 4;

// sums[rank][row] = inputs[row] . down[rank], for some ranks.
template <class Format, int kCount, int kRows>
inline void lora_down(const typename Format::Stored *const *inputs,
                      const typename Format::Stored *down, int width, float scale,
                      float (*sums)[kRows]) {
  Floats parts[kCount][kRows] = {};
  each_vector(width, [&](int i, auto count) {
    Floats values[kRows];
    for (int row = 0; row < kRows; ++row) values[row] = load<Format>(inputs[row] + i, count);
    for (int rank = 0; rank < kCount; ++rank) {
      const Floats weight = load<Format>(down + int64_t{rank} * width + i, count);
      for (int row = 0; row < kRows; ++row)
        parts[rank][row] = multiply_add(values[row], weight, parts[rank][row]);
    }
  });
  for (int rank = 0; rank < kCount; ++rank)
    for (int row = 0; row < kRows; ++row) sums[rank][row] = sum(parts[rank][row]) * scale;
}

// Rows first .. first + kRows - 1, all of one adapter.
template <class Format, int kRows>
void lora_part(const ost_lora &op, const ost_lora_part &part, int64_t first) {
  using Stored = typename Format::Stored;
  const Stored *inputs[kRows];
  Stored *outputs[kRows];
  for (int row = 0; row < kRows; ++row) {
    inputs[row] = static_cast<const Stored *>(op.inputs.data) + (first + row) * op.inputs.stride;
    outputs[row] = static_cast<Stored *>(op.outputs.data) + (first + row) * op.outputs.stride +
                   part.first_output;
  }
  const Stored *down = static_cast<const Stored *>(part.down);
  float sums[OST_MAX_LORA_RANK][kRows];
  int rank = 0;
  for (; rank + kRanks <= part.rank; rank += kRanks)
    lora_down<Format, kRanks, kRows>(inputs, down + int64_t{rank} * op.num_inputs, op.num_inputs,
                                     part.scale, sums + rank);
  for (; rank < part.rank; ++rank)
    lora_down<Format, 1, kRows>(inputs, down + int64_t{rank} * op.num_inputs, op.num_inputs,
                                part.scale, sums + rank);
  const Stored *up = static_cast<const Stored *>(part.up);
  each_vector(part.num_outputs, [&](int i, auto count) {
    Floats updates[kRows] = {};
    for (int k = 0; k < part.rank; ++k) {
      const Floats weight = load<Format>(up + int64_t{k} * part.num_outputs + i, count);
      for (int row = 0; row < kRows; ++row)
        updates[row] = multiply_add(all(sums[k][row]), weight, updates[row]);
    }
    for (int row = 0; row < kRows; ++row)
      store<Format>(outputs[row] + i, load<Format>(outputs[row] + i, count) + updates[row], count);
  });
}

template <class Format>
void lora_segment(const ost_lora &op, const ost_lora_layer &layer, int64_t first, int64_t last) {
  for (int64_t index = 0; index < layer.num_parts; ++index) {
    int64_t row = first;
    for (; row + 4 <= last; row += 4) lora_part<Format, 4>(op, layer.parts[index], row);
    for (; row < last; ++row) lora_part<Format, 1>(op, layer.parts[index], row);
  }
}

void lora_rows(const ost_lora &op, int64_t first, int64_t last) {
  for (int64_t index = 0; index < op.step->num_segments; ++index) {
    const ost_lora_segment &segment = op.step->segments[index];
    const int64_t begin = segment.first_row - op.first_row, end = segment.end_row - op.first_row;
    const int64_t from = begin < first ? first : begin, to = end < last ? end : last;
    if (from >= to) continue;
    const ost_lora_layer &layer = segment.layers[op.layer];
    op.dtype == OST_BFLOAT16 ? lora_segment<BFloat16>(op, layer, from, to)
                             : lora_segment<Float32>(op, layer, from, to);
  }
}

}  // namespace
