// Shares a step's attention out over threads.
//
// A task is an item of the plan and one head of keys; threads take tasks by a counter, and when all
// are done, rows that were cut into partials are merged the same way.
#include <atomic>
#include <cstdint>

#include "attention/kernels.h"
#include "threads/parallel.h"

namespace ost {
namespace {

struct Work {
  const ost_attention &attention;
  const Kernels &kernels;
  int64_t num_tasks;
  std::atomic<int64_t> next{0};
};

void take_items(void *context) {
  Work &work = *static_cast<Work *>(context);
  const ost_attention &a = work.attention;
  bool is_prefetched = false;
  for (int64_t task = work.next++; task < work.num_tasks;) {
    // Taken early, so that memory can be asked for it; not where others would wait for it.
    const bool is_early = work.next + a.num_threads <= work.num_tasks;
    int64_t next = is_early ? work.next++ : -1;
    if (next >= work.num_tasks) next = -1;
    work.kernels.attend(a, task_of(a, task, next, is_prefetched));
    is_prefetched = next >= 0;
    task = is_prefetched ? next : work.next++;
  }
}

void take_merges(void *context) {
  Work &work = *static_cast<Work *>(context);
  const ost_attention &a = work.attention;
  for (int64_t task; (task = work.next++) < work.num_tasks;)
    for (int32_t head = 0; head < a.num_heads; ++head)
      work.kernels.merge(a, static_cast<int32_t>(task), head);
}

void run(void (*take)(void *), const ost_attention &attention, int64_t num_tasks) {
  Work work{attention, kernels(), num_tasks};
  run_on_threads(take, &work,
                 num_tasks < attention.num_threads ? static_cast<int32_t>(num_tasks)
                                                   : attention.num_threads);
}

}  // namespace

const Kernels &kernels() {
#if defined(__x86_64__)
  switch (ost_current_isa()) {
    case OST_AMX:
      return kAmxKernels;
    case OST_AVX512_BF16:
      return ost_attention_isa() == OST_AVX512 ? kAvx512Kernels : kAvx512Bf16Kernels;
    case OST_AVX512:
      return kAvx512Kernels;
    case OST_AVX2:
      return kAvx2Kernels;
  }
#elif defined(__aarch64__)
  if (ost_current_isa() >= OST_NEON) return kNeonKernels;
#endif
  return kGenericKernels;
}

}  // namespace ost

extern "C" void ost_attend(const ost_attention *attention) {
  const ost_attention &a = *attention;
  ost::run(ost::take_items, a, int64_t{a.num_items} * a.kv.num_kv_heads);
  if (a.num_merges > 0) ost::run(ost::take_merges, a, a.num_merges);
}
