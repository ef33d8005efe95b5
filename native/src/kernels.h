// Which functions does every instruction set bring? One table each, from one source: kernels_*.cpp
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
  bool is_asked;  // whether it was a next_item
};

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
#endif

// Those of the instruction set in use.
const Kernels &kernels();

}  // namespace ost
