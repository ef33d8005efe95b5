// How are a few rows multiplied with a weight as fast as it can be read?
//
// A decode step reads every weight once and computes next to nothing with it. Each thread streams
// tiles as they lie, asking ahead for those that follow, and all rows look at a tile while it is
// there. Many rows are oneDNN's: it reads the same tiles.
#include <atomic>

#include "parallel.h"
#include "product_kernels.h"

namespace ost {

namespace {

// Weight that a thread takes at a time: long enough to be streamed, short enough to be shared out.
constexpr int64_t kPieceBytes = 256 << 10;

struct Shares {
  const ost_product &product;
  ProductKernel kernel;
  int64_t num_tiles, tiles_per_piece;
  std::atomic<int64_t> next{0};

  static void run(void *context) {
    Shares &shares = *static_cast<Shares *>(context);
    for (;;) {
      const int64_t first = shares.next.fetch_add(shares.tiles_per_piece);
      if (first >= shares.num_tiles) return;
      const int64_t last = first + shares.tiles_per_piece;
      shares.kernel(shares.product, first, last < shares.num_tiles ? last : shares.num_tiles);
    }
  }
};

ProductKernel kernel_for([[maybe_unused]] int32_t num_rows) {
#if defined(__x86_64__)
  if (num_rows > 1 && ost_current_isa() >= OST_AMX) return product_amx;
  return product_avx512_bf16;
#else
  return nullptr;
#endif
}

}  // namespace

}  // namespace ost

extern "C" {

int32_t ost_ops_product_rows(void) {
  const int32_t isa = ost_current_isa();
  return isa >= OST_AMX ? ost::kMostTileRows : isa >= OST_AVX512_BF16 ? ost::kVectorRows : 0;
}

void ost_ops_product(const ost_product *product) {
  const int64_t tile_bytes = int64_t{product->num_inputs} * ost::kTileOutputs * 2;
  const int64_t num_tiles = product->num_outputs / ost::kTileOutputs;
  int64_t per_piece = ost::kPieceBytes / tile_bytes;
  if (per_piece * product->num_threads > num_tiles) per_piece = num_tiles / product->num_threads;
  if (per_piece < 1) per_piece = 1;
  ost::Shares shares{*product, ost::kernel_for(product->num_rows), num_tiles, per_piece};
  ost::run_on_threads(ost::Shares::run, &shares, product->num_threads);
}
}
