// The kernels for every processor, see kernels.h.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd_generic.h"
// after it
#include "attention_math.h"
#include "attention_ahead.h"
// after it
#include "attention_tile.h"
// after them
#include "attention_item.h"
#include "kv_write.h"

namespace ost {

const Kernels kGenericKernels = {attend_any, merge, write};

}  // namespace ost
