// The kernels for NEON, which every 64-bit ARM processor has, see kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd_neon.h"
// after it
#include "attention_math.h"
#include "attention_ahead.h"
// after it
#include "attention_tile.h"
// after them
#include "attention_item.h"
#include "kv_write.h"

namespace ost {

const Kernels kNeonKernels = {attend_any, merge, write};

}  // namespace ost
