// Kernels of attention and of KV writes: one table for each instruction set. All attention/kernels_*.cpp
// include the same headers and are compiled for their processor.
#pragma once

#include <cstdint>

#include "ostinato_native.h"

namespace ost {

// An item's rows, for the query heads of one head of keys; and what its thread takes next, if it is
// known, so that memory can be asked for the beginning of that.
struct Task {
  const ost_item *item;
  int32_t kv_head;
  const ost_item *next_item;
  int32_t next_head;
  bool is_prefetched;  // whether it was a next_item
};

// Task number n of a step, and the one that is taken after it, or -1; heads of an item are neighbours.
inline Task task_of(const ost_attention &a, int64_t n, int64_t next, bool is_prefetched) {
  const int64_t heads = a.kv.num_kv_heads;
  Task task{a.items + n / heads, static_cast<int32_t>(n % heads), nullptr, 0, is_prefetched};
  if (next >= 0) {
    task.next_item = a.items + next / heads;
    task.next_head = static_cast<int32_t>(next % heads);
  }
  return task;
}

struct Kernels {
  void (*attend)(const ost_attention &attention, const Task &task);
  // A row's partials become its output, for one query head.
  void (*merge)(const ost_attention &attention, int32_t index, int32_t head);
  // Tokens first..last - 1 of a write, for one head.
  void (*write)(const ost_kv &kv, const ost_rows &keys, const ost_rows &values,
                const int64_t *slots, int64_t first, int64_t last, int32_t kv_head);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels, kAmxKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

// Those of the instruction set in use.
const Kernels &kernels();

}  // namespace ost
