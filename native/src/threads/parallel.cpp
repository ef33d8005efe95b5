// torch's own OpenMP runtime lends its threads: linking another one would double the threads, and
// two pools that spin while they wait take each other's processors. GOMP_parallel is the entry that
// compiled code calls, and libgomp and LLVM's libomp both have it. Without one, threads are started
// for each call.
#include "threads/parallel.h"

#include <thread>
#include <vector>

// Found when this library is loaded, among what the process has loaded before; else null.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

namespace ost {

void run_on_threads(void (*task)(void *), void *context, int32_t num_threads) {
  if (num_threads <= 1) {
    task(context);
    return;
  }
  if (GOMP_parallel != nullptr) {
    GOMP_parallel(task, context, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  for (int32_t i = 1; i < num_threads; ++i) helpers.emplace_back(task, context);
  task(context);
  for (std::thread &helper : helpers) helper.join();
}

}  // namespace ost
