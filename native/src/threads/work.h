// Works that threads share out, and their order.
#pragma once

#include <cstdint>

#include "ostinato_ops.h"

namespace ost {

// Units 0 .. num_units - 1, each computed once, by whichever thread takes it.
struct Work {
  const void *record;
  void (*compute)(const void *record, int64_t first, int64_t last);
  int64_t num_units;
  int64_t units_per_piece;  // what a thread takes at a time
  bool dearest_first = false;  // else each thread begins with neighbours of its own
};

// One work after the other, each by all threads: none begins before the one before is done.
void run_works(const Work *works, int64_t num_works, int32_t num_threads);

// A single work, by as many threads as it is worth.
void run_work(const Work &work, int32_t num_threads);

// How many works this thread has begun: what it makes for one may be used until the next.
int64_t works_begun();

// How operations are cut. A program's threads are awake, so its pieces are small.
Work work_of(const ost_add_norm &op);
Work work_of(const ost_heads &op);
Work work_of(const ost_gated &op);
Work work_of(const ost_best &op);
Work work_of(const ost_scan &op);
Work work_of(const ost_convolution &op);
Work work_of(const ost_gated_norm &op);
Work work_of(const ost_product &product);

// A mixer's convolution, and then its scan.
Work convolution_of(const ost_mixer &op);
Work scan_of(const ost_mixer &op);

// The product and what its gates let through, in one; only where they go together, else they are two works.
Work work_of(const ost_gated_product &op);
bool gates_at_once(const ost_gated_product &op);

}  // namespace ost
