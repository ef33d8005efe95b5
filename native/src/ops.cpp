// Who computes which rows of an operation, and with which instructions?
#include <atomic>

#include "ops_kernels.h"
#include "parallel.h"

namespace ost {

namespace {

// Numbers below which waking another thread costs more than it saves: some 10 microseconds' work.
constexpr int64_t kNumbersPerThread = 16384;
// Pieces per thread, so that one that started late leaves its share to the others.
constexpr int64_t kPiecesPerThread = 4;

const OpsKernels &kernels_in_use() {
#if defined(__x86_64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16) return ops_avx512_bf16();
  if (isa >= OST_AVX512) return ops_avx512();
  if (isa >= OST_AVX2) return ops_avx2();
#endif
  return ops_generic();
}

template <class Op>
struct Rows {
  const Op &op;
  void (*kernel)(const Op &, int64_t, int64_t);
  int64_t num_rows_per_piece;
  std::atomic<int64_t> next{0};

  static void run(void *context) {
    Rows &rows = *static_cast<Rows *>(context);
    for (;;) {
      const int64_t first = rows.next.fetch_add(rows.num_rows_per_piece);
      if (first >= rows.op.num_rows) return;
      const int64_t last = first + rows.num_rows_per_piece;
      rows.kernel(rows.op, first, last < rows.op.num_rows ? last : rows.op.num_rows);
    }
  }
};

template <class Op>
void over_rows(const Op &op, void (*kernel)(const Op &, int64_t, int64_t), int64_t row_width) {
  int64_t num_threads = op.num_rows * row_width / kNumbersPerThread;
  if (num_threads > op.num_threads) num_threads = op.num_threads;
  if (num_threads <= 1) return kernel(op, 0, op.num_rows);
  const int64_t num_pieces = num_threads * kPiecesPerThread;
  Rows<Op> rows{op, kernel, (op.num_rows + num_pieces - 1) / num_pieces};
  run_on_threads(Rows<Op>::run, &rows, static_cast<int32_t>(num_threads));
}

}  // namespace

}  // namespace ost

extern "C" {

void ost_ops_add_norm(const ost_add_norm *op) {
  ost::over_rows(*op, ost::kernels_in_use().add_norm, op->width);
}

void ost_ops_heads(const ost_heads *op) {
  const int64_t num_heads = op->num_heads + 2 * int64_t{op->num_kv_heads};
  ost::over_rows(*op, ost::kernels_in_use().heads, num_heads * op->head_dim);
}

void ost_ops_gated(const ost_gated *op) {
  ost::over_rows(*op, ost::kernels_in_use().gated, 2 * int64_t{op->width});
}
}
