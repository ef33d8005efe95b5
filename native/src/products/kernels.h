// The kernels of products, by instruction set and format.
#pragma once

#include "weights/tiles.h"

namespace ost {

// Outputs 32 * first .. 32 * last - 1 of all rows.
using ProductKernel = void (*)(const ost_product &product, int64_t first, int64_t last);

// Some inputs of a tile as plain numbers, and the sums of all rows with the inputs before them.
struct TilePiece {
  const void *weights;
  int64_t tile, first_input, num_inputs;
  float *sums;  // (num_rows, 32); not read by the piece of the first input, nor written by the last
};

// products/vectors.cpp, compiled once for each set: kernels for a format of ost_dtype. One multiplies all
// rows with whole tiles, one with a piece.
struct PlainKernels {
  ProductKernel multiply;
  void (*add_piece)(const ost_product &product, const TilePiece &piece);
};
PlainKernels products_generic(int32_t dtype);
PlainKernels products_avx2(int32_t dtype);
PlainKernels products_avx512(int32_t dtype);
PlainKernels products_avx512_bf16(int32_t dtype);
PlainKernels products_neon(int32_t dtype);
PlainKernels products_neon_bf16(int32_t dtype);

// products/codes.cpp, compiled once for each set: kernels for a weight of codes. One multiplies rows of
// bfloat16 and float32; one writes inputs first .. last - 1 of a tile as weights/tiles.h has them, in the product's
// format: of a weight that is not in order all inputs, else multiples of 8.
struct CodeKernels {
  ProductKernel multiply;
  void (*expand)(const ost_product &product, int64_t tile, int64_t first, int64_t last, void *out);
};
CodeKernels codes_generic(int32_t weight_format);
CodeKernels codes_avx2(int32_t weight_format);
CodeKernels codes_avx512(int32_t weight_format);
CodeKernels codes_avx512_bf16(int32_t weight_format);
CodeKernels codes_neon(int32_t weight_format);
CodeKernels codes_neon_dotprod(int32_t weight_format);
CodeKernels codes_neon_i8mm(int32_t weight_format);

// bfloat16 by AMX: up to here a weight takes longer to read than to multiply with.
constexpr int kFewTileRows = 48;
void product_amx(const ost_product &product, int64_t first, int64_t last);

// Of many rows, a unit is 32 outputs of a block of rows; blocks come one after the other.
void product_amx_many(const ost_product &product, int64_t first, int64_t last);
int64_t blocks_of_many(const ost_product &product);

// The same, but a unit is 32 gates and the numbers that they let through.
void product_gated_amx(const ost_gated_product &op, int64_t first, int64_t last);

}  // namespace ost
