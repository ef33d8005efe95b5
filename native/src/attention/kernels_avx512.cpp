// The kernels for AVX-512, see attention/kernels.h.
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
#include "attention/item.h"
#include "kv/write.h"

namespace ost {

const Kernels kAvx512Kernels = {attend_any, merge, write};

}  // namespace ost
