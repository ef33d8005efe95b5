// Who multiplies a few rows with some tiles of a weight?
#pragma once

#include "ostinato_ops.h"

namespace ost {

constexpr int kTileOutputs = 32;

// Units first .. last - 1. Of a few rows, a unit is 32 outputs of all of them.
using ProductKernel = void (*)(const ost_product &product, int64_t first, int64_t last);

constexpr int kVectorRows = 8;   // up to here vectors keep up with the memory
constexpr int kFewTileRows = 48;  // up to here a weight takes longer to read than to multiply with

void product_avx512_bf16(const ost_product &product, int64_t first, int64_t last);
void product_amx(const ost_product &product, int64_t first, int64_t last);

// Of many rows, a unit is 32 outputs of a block of rows; blocks come one after the other.
void product_amx_many(const ost_product &product, int64_t first, int64_t last);
int64_t blocks_of_many(const ost_product &product);

// The same, but a unit is 32 gates and the numbers that they let through.
void product_gated_amx(const ost_gated_product &op, int64_t first, int64_t last);

}  // namespace ost
