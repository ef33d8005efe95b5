// Kernels of the operations between products: one table for each instruction set.
#pragma once

#include <cstdint>

#include "ostinato_ops.h"

namespace ost {

// Each computes rows first..last - 1 on the calling thread.
struct OpsKernels {
  void (*add_norm)(const ost_add_norm &op, int64_t first, int64_t last);
  void (*heads)(const ost_heads &op, int64_t first, int64_t last);
  void (*gated)(const ost_gated &op, int64_t first, int64_t last);
  void (*best)(const ost_best &op, int64_t first, int64_t last);
  void (*scan)(const ost_scan &op, int64_t first, int64_t last);
  void (*convolution)(const ost_convolution &op, int64_t first, int64_t last);
  void (*gated_norm)(const ost_gated_norm &op, int64_t first, int64_t last);
  // Units of a mixer's first work and of its second, see ops/mixer.h.
  void (*convolve_sequences)(const ost_mixer &op, int64_t first, int64_t last);
  void (*scan_sequences)(const ost_mixer &op, int64_t first, int64_t last);
  // outputs += scale * update, width numbers; the product is rounded as well.
  void (*add_scaled)(void *outputs, const void *update, int32_t width, float scale, int32_t dtype);
};

// ops/kernels.cpp, compiled once for each of them.
const OpsKernels &ops_generic();
const OpsKernels &ops_avx2();
const OpsKernels &ops_avx512();
const OpsKernels &ops_avx512_bf16();
const OpsKernels &ops_neon();

// Those of the instruction set in use.
const OpsKernels &ops_kernels();

}  // namespace ost
