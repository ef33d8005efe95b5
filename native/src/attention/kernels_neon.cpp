// The kernels for NEON, which every 64-bit ARM processor has, see attention/kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/neon.h"
// after it
#include "attention/math.h"
#include "attention/prefetch.h"
// after it
#include "attention/tile.h"
// after them
#include "attention/item.h"
#include "kv/write.h"

namespace ost {

const Kernels kNeonKernels = {attend_any, merge, write};

}  // namespace ost
