// How are rows multiplied with a weight in tiles?
//
// A decode step reads every weight once and computes next to nothing with it. Each thread streams
// tiles as they lie, asking ahead for those that follow, and all rows look at a tile while it is
// there. For many rows see product_amx_many.cpp; without AMX they are oneDNN's, which reads the same
// tiles.
#include "product_kernels.h"
#include "work.h"

namespace ost {

namespace {

// Weight that a thread takes at a time: long enough to be streamed, short enough to be shared out.
constexpr int64_t kPieceBytes = 256 << 10;
constexpr int64_t kManyPiece = 8;

ProductKernel kernel_for(int32_t num_rows) {
#if defined(__x86_64__)
  if (ost_current_isa() < OST_AMX) return product_avx512_bf16;
  return num_rows > kFewTileRows ? product_amx_many : product_amx;
#else
  return nullptr;
#endif
}

// Units that a thread takes at a time. Those of many rows are long, and follow on each other.
Work work_of_many(const ost_product &product, Work work) {
#if defined(__x86_64__)
  work.num_units *= blocks_of_many(product);
#endif
  work.units_per_piece = kManyPiece;
  return work;
}

bool in_blocks(const ost_product &product) {
  return product.num_rows > kFewTileRows && ost_current_isa() >= OST_AMX;
}

}  // namespace

Work work_of(const ost_product &product) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    const auto &p = *static_cast<const ost_product *>(record);
    kernel_for(p.num_rows)(p, first, last);
  };
  const int64_t per_piece = kPieceBytes / (int64_t{product.num_inputs} * kTileOutputs * 2);
  const Work work{&product, compute, product.num_outputs / kTileOutputs,
                  per_piece < 1 ? 1 : per_piece};
  return in_blocks(product) ? work_of_many(product, work) : work;
}

bool gates_at_once(const ost_gated_product &op) {
  return in_blocks(op.product) && op.product.num_outputs % (2 * kTileOutputs) == 0;
}

Work work_of(const ost_gated_product &op) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
#if defined(__x86_64__)
    product_gated_amx(*static_cast<const ost_gated_product *>(record), first, last);
#endif
  };
  return work_of_many(op.product, {&op, compute, op.product.num_outputs / kTileOutputs / 2, 1});
}

}  // namespace ost

extern "C" {

void ost_ops_gated_product(const ost_gated_product *op) {
  if (ost::gates_at_once(*op)) return ost::run_work(ost::work_of(*op), op->product.num_threads);
  ost_ops_product(&op->product);
  ost_ops_gated(&op->gated);
}

int32_t ost_ops_product_rows(void) {
  const int32_t isa = ost_current_isa();
  return isa >= OST_AMX ? INT32_MAX : isa >= OST_AVX512_BF16 ? ost::kVectorRows : 0;
}

void ost_ops_product(const ost_product *product) {
  const ost::Work work = ost::work_of(*product);
  const int64_t num_threads = product->num_threads;
  ost::run_works(&work, 1, static_cast<int32_t>(
      work.num_units < num_threads ? work.num_units : num_threads));
}
}
