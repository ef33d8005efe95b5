// Threads compute works together; none waits for a thread that has not come.
//
// A work is over when its units are computed, not when all threads have said so: who comes late,
// because it was woken late or another program has its processor, finds nothing left and goes on.
// Each thread has a share of neighbouring units, so that what it reads follows on what it has read;
// who is through with its own takes single units of the others'.
#include "threads/work.h"

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

#include "threads/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ost {

namespace {

// Turns of waiting, some 100 microseconds, after which the processor is offered to others.
constexpr int kPatience = 2000;

thread_local int64_t num_begun = 0;

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

inline void wait_a_little(int turn) {
  if (turn >= kPatience) return std::this_thread::yield();
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  Team(const Work *works, int64_t num_works, int32_t num_threads)
      : works_(works), num_works_(num_works), num_shares_(num_threads),
        counters_(static_cast<size_t>(num_works * (num_threads + 1))) {}

  static void join(void *team) { static_cast<Team *>(team)->work_along(); }

 private:
  void work_along() {
    const int64_t me = num_joined_.fetch_add(1) % num_shares_;
    for (int64_t w = 0; w < num_works_; ++w) {
      ++num_begun;
      std::atomic<int64_t> &done = counter(w, num_shares_);
      int64_t computed = 0;
      for (int64_t i = 0; i < num_shares_; ++i) computed += take(w, (me + i) % num_shares_, i == 0);
      if (computed > 0) done.fetch_add(computed, std::memory_order_release);
      for (int turn = 0; done.load(std::memory_order_acquire) < works_[w].num_units; ++turn)
        wait_a_little(turn);
    }
  }

  // Computes what is left of a share; returns how many units those were.
  int64_t take(int64_t w, int64_t share, bool own) {
    const Work &work = works_[w];
    std::atomic<int64_t> &next = counter(w, share);
    const int64_t begin = bound(work, share), end = bound(work, share + 1);
    const int64_t at_a_time = own || work.dearest_first ? work.units_per_piece : 1;
    int64_t computed = 0;
    while (begin + next.load(std::memory_order_relaxed) < end) {
      const int64_t first = begin + next.fetch_add(at_a_time, std::memory_order_relaxed);
      if (first >= end) break;
      const int64_t last = first + at_a_time < end ? first + at_a_time : end;
      work.compute(work.record, first, last);
      computed += last - first;
    }
    return computed;
  }

  // Where a share begins; of a work that goes from dear to cheap, the first share is all.
  int64_t bound(const Work &work, int64_t share) const {
    if (work.dearest_first) return share == 0 ? 0 : work.num_units;
    return work.num_units * share / num_shares_;
  }

  std::atomic<int64_t> &counter(int64_t work, int64_t which) {
    return counters_[static_cast<size_t>(work * (num_shares_ + 1) + which)].value;
  }

  const Work *works_;
  const int64_t num_works_, num_shares_;
  std::vector<Counter> counters_;
  std::atomic<int64_t> num_joined_{0};
};

}  // namespace

int64_t works_begun() { return num_begun; }

void run_works(const Work *works, int64_t num_works, int32_t num_threads) {
  Team team(works, num_works, num_threads < 1 ? 1 : num_threads);
  run_on_threads(Team::join, &team, num_threads);
}

void run_work(const Work &work, int32_t num_threads) {
  const int64_t num_pieces = (work.num_units + work.units_per_piece - 1) / work.units_per_piece;
  if (num_pieces < num_threads) num_threads = static_cast<int32_t>(num_pieces);
  if (num_threads <= 1) {
    ++num_begun;
    return work.compute(work.record, 0, work.num_units);
  }
  run_works(&work, 1, num_threads);
}

}  // namespace ost
