// The kernels for AVX-512 with VDPBF16PS and VPDPWSSD, see attention/kernels.h. What is neither bfloat16 nor codes
// is AVX-512's.
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

namespace ost {
namespace {

void attend(const ost_attention &a, const Task &task) {
  if (a.kv.dtype == OST_BFLOAT16 && a.queries.dtype == OST_BFLOAT16)
    attend_item<BrainMath>(a, task);
  else if (a.kv.dtype == OST_KV_INT8)
    attend_item<CodeMath>(a, task);
  else
    kAvx512Kernels.attend(a, task);
}

void write_as_before(const ost_kv &kv, const ost_rows &keys, const ost_rows &values,
                     const int64_t *slots, int64_t first, int64_t last, int32_t kv_head) {
  kAvx512Kernels.write(kv, keys, values, slots, first, last, kv_head);
}

}  // namespace

const Kernels kAvx512Bf16Kernels = {attend, merge, write_as_before};

}  // namespace ost
