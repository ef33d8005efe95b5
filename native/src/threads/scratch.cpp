// See threads/scratch.h.
#include "threads/scratch.h"

#include <cstdlib>

namespace ost {
namespace {

struct Buffer {
  void *data = nullptr;
  int64_t bytes = 0;
  ~Buffer() { std::free(data); }
};

void *grow(Buffer &buffer, int64_t bytes) {
  if (buffer.bytes < bytes) {
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(4096, static_cast<size_t>(rounded));
    if (buffer.data == nullptr) std::abort();
    buffer.bytes = rounded;
  }
  return buffer.data;
}

}  // namespace

void *thread_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  return grow(buffer, bytes);
}

void *tile_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  return grow(buffer, bytes);
}

void *rows_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  return grow(buffer, bytes);
}

void *sums_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  return grow(buffer, bytes);
}

void *experts_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  return grow(buffer, bytes);
}

}  // namespace ost
