// The kernels for every processor, see attention/kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/generic.h"
// after it
#include "attention/math.h"
#include "attention/prefetch.h"
// after it
#include "attention/tile.h"
// after them
#include "attention/item.h"
#include "kv/write.h"

namespace ost {

const Kernels kGenericKernels = {attend_any, merge, write};

}  // namespace ost
