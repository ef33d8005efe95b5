// The kernels for AVX2, FMA and F16C, see kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd_avx2.h"
// after it
#include "attention_math.h"
#include "attention_ahead.h"
// after it
#include "attention_tile.h"
// after them
#include "attention_item.h"
#include "kv_write.h"

namespace ost {

const Kernels kAvx2Kernels = {attend_any, merge, write};

}  // namespace ost
