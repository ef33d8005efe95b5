// torch's own OpenMP runtime lends its threads: linking another one would double the threads, and
// two pools that spin while they wait take each other's processors. GOMP_parallel is the entry that
// compiled code calls, and libgomp and LLVM's libomp both have it. Without one, threads are started
// for each call.
#include "parallel.h"

#include <dlfcn.h>

#include <thread>
#include <vector>

namespace ost {

namespace {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

GompParallel find_gomp() {
  return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
}

}  // namespace

void run_on_threads(void (*task)(void *), void *context, int32_t num_threads) {
  if (num_threads <= 1) {
    task(context);
    return;
  }
  static const GompParallel gomp = find_gomp();
  if (gomp != nullptr) {
    gomp(task, context, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  for (int32_t i = 1; i < num_threads; ++i) helpers.emplace_back(task, context);
  task(context);
  for (std::thread &helper : helpers) helper.join();
}

}  // namespace ost
