// The sampling kernel of each instruction set.
#pragma once

#include "ostinato_sampling.h"

namespace ost {

// Entries first..last - 1 on the calling thread.
using SamplingKernel = void (*)(const ost_sampling &op, int64_t first, int64_t last);

// sampling/kernels.cpp, compiled once for each.
void sampling_generic(const ost_sampling &op, int64_t first, int64_t last);
void sampling_avx2(const ost_sampling &op, int64_t first, int64_t last);
void sampling_avx512(const ost_sampling &op, int64_t first, int64_t last);
void sampling_avx512_bf16(const ost_sampling &op, int64_t first, int64_t last);
void sampling_neon(const ost_sampling &op, int64_t first, int64_t last);

}  // namespace ost
