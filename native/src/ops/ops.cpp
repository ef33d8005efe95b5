// Shares the rows of an operation out over threads, and chooses the kernels that compute them.
#include "ops/kernels.h"
#include "threads/work.h"

namespace ost {

const OpsKernels &ops_kernels() {
#if defined(__x86_64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16) return ops_avx512_bf16();
  if (isa >= OST_AVX512) return ops_avx512();
  if (isa >= OST_AVX2) return ops_avx2();
#elif defined(__aarch64__)
  if (ost_current_isa() >= OST_NEON) return ops_neon();
#endif
  return ops_generic();
}

namespace {

// Numbers that a thread takes at a time: some microseconds' work.
constexpr int64_t kNumbersPerPiece = 4096;
// Numbers below which waking another thread costs more than it saves: where they are computed with,
// and where they are but compared, many at a time.
constexpr int64_t kNumbersPerThread = 16384;
constexpr int64_t kComparedPerThread = 1 << 20;

template <class Op, void (*OpsKernels::*kKernel)(const Op &, int64_t, int64_t)>
Work over_rows(const Op &op, int64_t row_width) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    (ops_kernels().*kKernel)(*static_cast<const Op *>(record), first, last);
  };
  const int64_t per_piece = kNumbersPerPiece / row_width;
  return {&op, compute, op.num_rows, per_piece < 1 ? 1 : per_piece};
}

template <class Op>
void run(const Op &op, int64_t row_width, int64_t per_thread = kNumbersPerThread) {
  const int64_t num_threads = op.num_rows * row_width / per_thread;
  run_work(work_of(op), num_threads < op.num_threads ? static_cast<int32_t>(num_threads)
                                                     : op.num_threads);
}

int64_t work_per_row(const ost_scan &op) { return int64_t{op.num_tokens} * op.key_dim * op.value_dim; }

int64_t width_of(const ost_heads &op) {
  return (op.num_heads + 2 * int64_t{op.num_kv_heads}) * op.head_dim;
}

}  // namespace

Work work_of(const ost_add_norm &op) {
  return over_rows<ost_add_norm, &OpsKernels::add_norm>(op, op.width);
}

Work work_of(const ost_heads &op) {
  return over_rows<ost_heads, &OpsKernels::heads>(op, width_of(op));
}

Work work_of(const ost_gated &op) {
  return over_rows<ost_gated, &OpsKernels::gated>(op, 2 * int64_t{op.width});
}

Work work_of(const ost_best &op) {
  return over_rows<ost_best, &OpsKernels::best>(op, op.width);
}

Work work_of(const ost_scan &op) {
  return over_rows<ost_scan, &OpsKernels::scan>(op, work_per_row(op));
}

Work work_of(const ost_convolution &op) {
  return over_rows<ost_convolution, &OpsKernels::convolution>(op, op.width);
}

Work work_of(const ost_gated_norm &op) {
  return over_rows<ost_gated_norm, &OpsKernels::gated_norm>(op, int64_t{op.num_groups} * op.width);
}

// A unit is a run of a sequence's channels, or its decays and betas.
Work convolution_of(const ost_mixer &op) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    ops_kernels().convolve_sequences(*static_cast<const ost_mixer *>(record), first, last);
  };
  return {&op, compute, op.step->num_sequences * (op.num_runs + 1), 1};
}

// A unit is a head of a sequence.
Work scan_of(const ost_mixer &op) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    ops_kernels().scan_sequences(*static_cast<const ost_mixer *>(record), first, last);
  };
  return {&op, compute, op.step->num_sequences * op.scan.num_heads, 1};
}

}  // namespace ost

extern "C" {

void ost_ops_add_norm(const ost_add_norm *op) { ost::run(*op, op->width); }

void ost_ops_heads(const ost_heads *op) { ost::run(*op, ost::width_of(*op)); }

void ost_ops_gated(const ost_gated *op) { ost::run(*op, 2 * int64_t{op->width}); }

void ost_ops_best(const ost_best *op) { ost::run(*op, op->width, ost::kComparedPerThread); }

void ost_ops_scan(const ost_scan *op) { ost::run(*op, ost::work_per_row(*op)); }

void ost_ops_gated_norm(const ost_gated_norm *op) { ost::run(*op, int64_t{op->num_groups} * op->width); }

void ost_ops_convolution(const ost_convolution *op) { ost::run(*op, op->width); }
}
