// Shares the rows of a batch out over threads.
#include "sampling/kernels.h"
#include "threads/work.h"

namespace ost {
namespace {

// Numbers below which waking another thread costs more than it saves.
constexpr int64_t kNumbersPerThread = 65536;

SamplingKernel sampling_kernel() {
#if defined(__x86_64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16) return sampling_avx512_bf16;
  if (isa >= OST_AVX512) return sampling_avx512;
  if (isa >= OST_AVX2) return sampling_avx2;
#elif defined(__aarch64__)
  if (ost_current_isa() >= OST_NEON) return sampling_neon;
#endif
  return sampling_generic;
}

void compute(const void *record, int64_t first, int64_t last) {
  sampling_kernel()(*static_cast<const ost_sampling *>(record), first, last);
}

}  // namespace
}  // namespace ost

extern "C" void ost_sample(const ost_sampling *op) {
  const int64_t threads = op->num_rows * op->width / ost::kNumbersPerThread;
  ost::run_work({op, ost::compute, op->num_rows, 1},
                threads < op->num_threads ? static_cast<int32_t>(threads) : op->num_threads);
}
