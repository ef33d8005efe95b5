// How products are cut into units that threads share out.
//
// A decode step reads every weight once and computes next to nothing with it: each thread streams
// its tiles in order. Many rows go in blocks, so that a block's rows stay in the processor's caches
// while tiles pass by.
#include <algorithm>

#include "simd/formats.h"
#include "products/kernels.h"
#include "threads/scratch.h"
#include "threads/work.h"

namespace ost {

namespace {

// Weight that a thread takes at a time: long enough to be streamed, short enough to be shared out.
constexpr int64_t kPieceBytes = 256 << 10;
constexpr int64_t kManyPiece = 8;  // units of many rows
constexpr int64_t kBlockBytes = 1 << 20;  // of rows
constexpr int64_t kPieceInputs = 64;  // of a tile of codes that becomes plain numbers
constexpr int64_t kFewestBlockRows = 96;  // below, weights pass by too often

bool by_amx([[maybe_unused]] const ost_product &product) {
#if defined(__x86_64__)
  return ost_current_isa() >= OST_AMX && product.dtype == OST_BFLOAT16 &&
         product.activation_bits == 0 && !in_blocks(product.weight_format);
#else
  return false;
#endif
}

bool in_amx_blocks(const ost_product &product) {
  return by_amx(product) && product.num_rows > kFewTileRows;
}

PlainKernels plain_kernels(int32_t dtype) {
#if defined(__x86_64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16 && dtype == OST_BFLOAT16) return products_avx512_bf16(dtype);
  if (isa >= OST_AVX512) return products_avx512(dtype);
  if (isa >= OST_AVX2) return products_avx2(dtype);
#elif defined(__aarch64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_NEON_BF16 && dtype == OST_BFLOAT16) return products_neon_bf16(dtype);
  if (isa >= OST_NEON) return products_neon(dtype);
#endif
  return products_generic(dtype);
}

CodeKernels code_kernels(int32_t weight_format) {
#if defined(__x86_64__)
  if (in_blocks(weight_format)) return codes_generic(weight_format);
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16) return codes_avx512_bf16(weight_format);
  if (isa >= OST_AVX512) return codes_avx512(weight_format);
  if (isa >= OST_AVX2) return codes_avx2(weight_format);
#elif defined(__aarch64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_NEON_I8MM) return codes_neon_i8mm(weight_format);
  if (isa >= OST_NEON_DOTPROD) return codes_neon_dotprod(weight_format);
  if (isa >= OST_NEON && !in_blocks(weight_format)) return codes_neon(weight_format);
#endif
  return codes_generic(weight_format);
}

int64_t bits_of(const ost_product &p) {
  return p.weight_format == OST_PLAIN ? 8 * bytes_of(p.dtype) : bits_of_codes(p.weight_format);
}

// Blocks are equally large, up to a row.
int64_t num_blocks(const ost_product &p) {
#if defined(__x86_64__)
  if (by_amx(p)) return in_amx_blocks(p) ? blocks_of_many(p) : 1;
#endif
  const int64_t fitting = kBlockBytes / (int64_t{p.num_inputs} * 4);
  const int64_t max_rows = std::max(kFewestBlockRows, fitting);
  return (p.num_rows + max_rows - 1) / max_rows;
}

ost_product block_of(const ost_product &product, int64_t block, int64_t blocks) {
  ost_product own = product;
  const int64_t first = product.num_rows * block / blocks;
  const auto from_first = [&](const ost_matrix &matrix) {
    const int64_t bytes = first * matrix.stride * bytes_of(product.dtype);
    return ost_matrix{static_cast<char *>(matrix.data) + bytes, matrix.stride};
  };
  own.inputs = from_first(product.inputs);
  own.outputs = from_first(product.outputs);
  own.num_rows = static_cast<int32_t>(product.num_rows * (block + 1) / blocks - first);
  return own;
}

// One tile of a weight of codes, as a weight of 32 outputs whose plain numbers are elsewhere.
ost_product tile_of(const ost_product &product, int64_t tile, void *numbers) {
  const int64_t size = bytes_of(product.dtype), first = tile * kTileOutputs;
  ost_product own = product;
  own.tiles = numbers;
  own.weight_format = OST_PLAIN;
  own.num_outputs = static_cast<int32_t>(
      std::min<int64_t>(kTileOutputs, product.num_outputs - first));
  own.outputs.data = static_cast<char *>(product.outputs.data) + first * size;
  if (own.bias != nullptr) own.bias = static_cast<const char *>(own.bias) + first * size;
  return own;
}

// Tiles are expanded by pieces, which stay in the level 1 cache while all rows are multiplied with them.
void multiply_expanded(const ost_product &product, int64_t first, int64_t last) {
  const int64_t piece = product.order == nullptr ? kPieceInputs : product.num_inputs;
  const int64_t bytes = kTileOutputs * piece * bytes_of(product.dtype);
  char *numbers = static_cast<char *>(tile_scratch(bytes + product.num_rows * kTileOutputs * 4));
  auto *sums = reinterpret_cast<float *>(numbers + bytes);
  const auto expand = code_kernels(product.weight_format).expand;
  const auto add_piece = plain_kernels(product.dtype).add_piece;
  for (int64_t tile = first; tile < last; ++tile) {
    const ost_product own = tile_of(product, tile, numbers);
    for (int64_t i = 0, end; i < product.num_inputs; i = end) {
      end = std::min<int64_t>(i + piece, product.num_inputs);
      expand(product, tile, i, end, numbers);
      add_piece(own, {numbers, 0, i, end - i, sums});
    }
  }
}

#if defined(__x86_64__)
void multiply_expanded_by_amx(const ost_product &product, int64_t first, int64_t last) {
  const int64_t per_block = num_tiles(product.num_outputs);
  void *numbers = tile_scratch(kTileOutputs * product.num_inputs * bytes_of(product.dtype));
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t tile = unit % per_block;
    code_kernels(product.weight_format).expand(product, tile, 0, product.num_inputs, numbers);
    const ost_product own = tile_of(product, tile, numbers);
    if (!in_amx_blocks(product)) product_amx(own, 0, 1);
    else product_amx_many(own, unit / per_block, unit / per_block + 1);
  }
}
#endif

ProductKernel kernel_of(const ost_product &p) {
  if (p.weight_format == OST_PLAIN) return plain_kernels(p.dtype).multiply;
  const bool by_integers = p.dtype != OST_FLOAT16 || p.activation_bits != 0;
  return by_integers ? code_kernels(p.weight_format).multiply : multiply_expanded;
}

// Calls a vector kernel for the units of each block among first .. last - 1.
void each_block(const ost_product &p, int64_t first, int64_t last) {
  const ProductKernel kernel = kernel_of(p);
  const int64_t blocks = num_blocks(p), per_block = num_tiles(p.num_outputs);
  while (first < last) {
    const int64_t block = first / per_block, begin = block * per_block;
    const int64_t end = std::min(last, begin + per_block);
    kernel(block_of(p, block, blocks), first - begin, end - begin);
    first = end;
  }
}

void compute(const void *record, int64_t first, int64_t last) {
  const auto &p = *static_cast<const ost_product *>(record);
#if defined(__x86_64__)
  if (by_amx(p) && p.weight_format != OST_PLAIN) return multiply_expanded_by_amx(p, first, last);
  if (by_amx(p)) return (in_amx_blocks(p) ? product_amx_many : product_amx)(p, first, last);
#endif
  each_block(p, first, last);
}

// Tiles of codes that a thread takes at a time: half of its share.
int64_t piece_of_codes(const ost_product &product) {
  return num_tiles(product.num_outputs) / std::max(1, 2 * product.num_threads);
}

}  // namespace

Work work_of(const ost_product &product) {
  const int64_t blocks = num_blocks(product), tiles = num_tiles(product.num_outputs);
  const int64_t tile_bytes = int64_t{product.num_inputs} * kTileOutputs * bits_of(product) / 8;
  const int64_t per_piece = std::max(int64_t{1}, kPieceBytes / tile_bytes);
  const bool is_many = in_amx_blocks(product) || blocks > 1;
  if (product.weight_format != OST_PLAIN && product.num_rows > 1)  // rows become integers for each
    return {&product, compute, blocks * tiles, std::max(per_piece, piece_of_codes(product))};
  return {&product, compute, blocks * tiles, is_many ? kManyPiece : per_piece};
}

// Gates that product_gated_amx knows.
static bool opens_at_once(int32_t activation) {
  return activation == OST_SILU || activation == OST_GELU_TANH;
}

bool gates_at_once(const ost_gated_product &op) {
  return in_amx_blocks(op.product) && op.product.weight_format == OST_PLAIN &&
         op.product.num_outputs % (2 * kTileOutputs) == 0 && opens_at_once(op.gated.activation);
}

Work work_of(const ost_gated_product &op) {
  const auto compute = []([[maybe_unused]] const void *record, [[maybe_unused]] int64_t first,
                          [[maybe_unused]] int64_t last) {
#if defined(__x86_64__)
    product_gated_amx(*static_cast<const ost_gated_product *>(record), first, last);
#endif
  };
  const int64_t pairs = op.product.num_outputs / kTileOutputs / 2;
  return {&op, compute, num_blocks(op.product) * pairs, kManyPiece};
}

}  // namespace ost

extern "C" {

void ost_ops_gated_product(const ost_gated_product *op) {
  if (ost::gates_at_once(*op)) return ost::run_work(ost::work_of(*op), op->product.num_threads);
  ost_ops_product(&op->product);
  ost_ops_gated(&op->gated);
}

void ost_ops_product(const ost_product *product) {
  const ost::Work work = ost::work_of(*product);
  const int64_t num_threads = product->num_threads;
  ost::run_works(&work, 1, static_cast<int32_t>(
      work.num_units < num_threads ? work.num_units : num_threads));
}
}
