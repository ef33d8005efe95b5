// The kernels for AVX-512, see kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd_avx512.h"
// after it
#include "attention_math.h"
#include "attention_ahead.h"
// after it
#include "attention_tile.h"
// after them
#include "attention_item.h"
#include "kv_write.h"

namespace ost {

const Kernels kAvx512Kernels = {attend_any, merge, write};

}  // namespace ost
