// Who multiplies a few rows with some tiles of a weight?
#pragma once

#include "ostinato_ops.h"

namespace ost {

constexpr int kTileOutputs = 32;

// Outputs 32 * first .. 32 * last - 1 of all rows.
using ProductKernel = void (*)(const ost_product &product, int64_t first, int64_t last);

constexpr int kVectorRows = 8;   // up to here vectors keep up with the memory
constexpr int kMostTileRows = 128;  // beyond, oneDNN computes faster than this reads

void product_avx512_bf16(const ost_product &product, int64_t first, int64_t last);
void product_amx(const ost_product &product, int64_t first, int64_t last);

}  // namespace ost
