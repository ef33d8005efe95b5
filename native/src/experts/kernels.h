// Kernels of a mixture between and after its products, by instruction set.
#pragma once

#include "ostinato_experts.h"

namespace ost {

// Rows that one expert gated, or is to gate.
struct Gating {
  const void *gate_up;  // rows of 2 * inner numbers, or of inner without ups
  void *output;         // rows of inner numbers
  int64_t inner;
  int32_t dtype, activation, has_up;
  float alpha, limit;
};

// One row of an expert, and the row of the step that it is of.
struct Share {
  int64_t row;
  float weight;
};

struct ExpertsKernels {
  void (*gate)(const Gating &gating, int64_t first_row, int64_t last_row);
  // sums[share.row] += share.weight * numbers, for some columns of rows that are `width` wide.
  void (*add_shares)(const Share *shares, int64_t num_shares, const void *numbers, int64_t stride,
                     int32_t dtype, float *sums, int64_t width, int64_t first, int64_t last);
  void (*round_sums)(const float *sums, void *outputs, int32_t dtype, int64_t count);
};

// experts/kernels.cpp, compiled once for each set.
const ExpertsKernels &experts_generic();
const ExpertsKernels &experts_avx2();
const ExpertsKernels &experts_avx512();
const ExpertsKernels &experts_avx512_bf16();
const ExpertsKernels &experts_neon();

}  // namespace ost
