// How are a few rows multiplied with a weight as fast as it can be read?
//
// A decode step reads every weight once and computes next to nothing with it. Each thread streams
// tiles as they lie, asking ahead for those that follow, and all rows look at a tile while it is
// there. Many rows are oneDNN's: it reads the same tiles.
#include "product_kernels.h"
#include "work.h"

namespace ost {

namespace {

// Weight that a thread takes at a time: long enough to be streamed, short enough to be shared out.
constexpr int64_t kPieceBytes = 256 << 10;

ProductKernel kernel_in_use() {
#if defined(__x86_64__)
  return ost_current_isa() >= OST_AMX ? product_amx : product_avx512_bf16;
#else
  return nullptr;
#endif
}

}  // namespace

// A unit is 32 outputs.
Work work_of(const ost_product &product) {
  const auto compute = [](const void *record, int64_t first, int64_t last) {
    const auto &p = *static_cast<const ost_product *>(record);
    kernel_in_use()(p, first, last);
  };
  const int64_t per_piece = kPieceBytes / (int64_t{product.num_inputs} * kTileOutputs * 2);
  return {&product, compute, product.num_outputs / kTileOutputs, per_piece < 1 ? 1 : per_piece};
}

}  // namespace ost

extern "C" {

int32_t ost_ops_product_rows(void) {
  const int32_t isa = ost_current_isa();
  return isa >= OST_AMX ? ost::kMostTileRows : isa >= OST_AVX512_BF16 ? ost::kVectorRows : 0;
}

void ost_ops_product(const ost_product *product) {
  const ost::Work work = ost::work_of(*product);
  const int64_t num_threads = product->num_threads;
  ost::run_works(&work, 1, static_cast<int32_t>(
      work.num_units < num_threads ? work.num_units : num_threads));
}
}
