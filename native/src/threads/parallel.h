// Runs work on the threads of torch's OpenMP runtime, without a second runtime beside it.
#pragma once

#include <cstdint>

namespace ost {

// Calls task(context) once on each of num_threads threads and returns when all are done. Tasks
// share their work by an atomic counter in the context.
void run_on_threads(void (*task)(void *), void *context, int32_t num_threads);

}  // namespace ost
