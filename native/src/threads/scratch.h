// Scratch memory of a task. Its thread keeps it from call to call, so that no page is faulted in twice.
#pragma once

#include <cstdint>

namespace ost {

// At least that many bytes, aligned to 64, this thread's until its next call of this function.
void *thread_scratch(int64_t bytes);

// Likewise, apart from the other: for a tile of a weight that such a task reads.
void *tile_scratch(int64_t bytes);

// Likewise: for rows that such a task brings together, and for what works of a call leave to others.
void *rows_scratch(int64_t bytes);
void *sums_scratch(int64_t bytes);

// Likewise: for what is between the products of a mixture of experts.
void *experts_scratch(int64_t bytes);

}  // namespace ost
