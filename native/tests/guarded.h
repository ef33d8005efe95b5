// Arrays that end at a guard page: reads and writes past the end fault, vector and tile instructions too.
//
// The sanitizer does not see into instructions written by hand. So every array of a test ends where
// a page begins that nobody may touch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t size) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = size * static_cast<int64_t>(sizeof(T));
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char *>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + mapped_ - page, page, PROT_NONE) != 0) {
      std::perror("no memory for a guarded array");
      std::exit(2);
    }
    data_ = reinterpret_cast<T *>(base_ + mapped_ - page - bytes);
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;

  T *data() { return data_; }
  int64_t size() const { return size_; }
  T &operator[](int64_t i) { return data_[i]; }
  const T &operator[](int64_t i) const { return data_[i]; }

 private:
  int64_t size_, mapped_ = 0;
  char *base_ = nullptr;
  T *data_ = nullptr;
};
