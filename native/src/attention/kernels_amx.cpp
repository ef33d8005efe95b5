// The kernels for AMX: bfloat16 in tiles, see attention/kernels.h. What is not bfloat16 is AVX-512's.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/avx512.h"
// after it
#include "attention/math.h"
#include "attention/prefetch.h"
// after it
#include "attention/tile.h"
// after them
#include "attention/amx.h"
// after them
#include "attention/item.h"

namespace ost {
namespace {

// Sizes that tiles do not divide, or too large ones, are for vectors, and so is what is not bfloat16.
void attend(const ost_attention &a, const Task &task) {
  const bool brain = a.kv.dtype == OST_BFLOAT16 && a.queries.dtype == OST_BFLOAT16;
  if (!brain || a.kv.key_dim % 32 != 0 || a.kv.key_dim > kMaxKeyDim || a.kv.value_dim % 16 != 0) {
    kAvx512Bf16Kernels.attend(a, task);
    return;
  }
  static const TileShapes shapes;
  _tile_loadconfig(&shapes);
  attend_item<TileMath>(a, task);
  _tile_release();
}

void write_as_before(const ost_kv &kv, const ost_rows &keys, const ost_rows &values,
                     const int64_t *slots, int64_t first, int64_t last, int32_t kv_head) {
  kAvx512Kernels.write(kv, keys, values, slots, first, last, kv_head);
}

}  // namespace

const Kernels kAmxKernels = {attend, merge, write_as_before};

}  // namespace ost
