// One row of logits in float32, and the best score of each chunk.
//
// Scores are compared as integers that grow as floats do, zero for both zeros. A token's key orders tokens by
// score, the best first, and equal ones by id, the lowest first; all keys differ.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/argmax.h"
#include "sampling/weights.h"
#include "threads/scratch.h"
#include "simd/simd.h"

namespace {

// Types of this file's own: the linker must not merge what the standard library makes of them with the same
// function compiled for another instruction set.
struct Key {
  uint64_t bits;
  bool operator<(const Key &other) const { return bits < other.bits; }
  int64_t id() const { return static_cast<int64_t>(bits & 0xffffffffu); }
  int32_t order() const { return static_cast<int32_t>(0x7fffffff - static_cast<int64_t>(bits >> 32)); }
  float score() const {
    const int32_t value = order();
    return ost::float_of_bits(value < 0 ? 0x80000000u | static_cast<uint32_t>(-value)
                                        : static_cast<uint32_t>(value));
  }
};

struct Candidate {
  Key key;
  int64_t mass;
  bool operator<(const Candidate &other) const { return key < other.key; }
};

struct Order {
  int32_t value;
  bool operator<(const Order &other) const { return value > other.value; }  // the best first
};

constexpr Key kEverything{std::numeric_limits<uint64_t>::max()};
constexpr int32_t kInfinity = 0x7f800000;

inline int32_t order_of(float score) { return ordered(static_cast<int32_t>(ost::bits_of_float(score))); }

inline Key key_of(int32_t order, int64_t id) {
  return {static_cast<uint64_t>(0x7fffffff - static_cast<int64_t>(order)) << 32 |
          static_cast<uint64_t>(id)};
}

// What a thread works on: a row at a time.
struct Scratch {
  float *scores;     // (chunks * kChunk,)
  int32_t *best;     // (chunks,)
  Order *orders;     // (chunks,)
  int64_t *up_to;    // (chunks,), mass of a chunk and those before it
  Key *keys;         // (chunks * kChunk,)
  Candidate *candidates;  // likewise
  int64_t *masses;   // likewise
  int32_t *counts;   // likewise
  uint16_t *buckets; // likewise

  explicit Scratch(int64_t chunks) {
    const int64_t numbers = chunks * kChunk;
    char *at = static_cast<char *>(ost::thread_scratch(
        numbers * (sizeof(float) + sizeof(Key) + sizeof(Candidate) + sizeof(int64_t) + sizeof(int32_t) +
                   sizeof(uint16_t)) +
        chunks * (sizeof(int32_t) + sizeof(Order) + sizeof(int64_t))));
    take(at, scores, numbers), take(at, keys, numbers), take(at, candidates, numbers);
    take(at, masses, numbers), take(at, up_to, chunks), take(at, counts, numbers), take(at, best, chunks), take(at, orders, chunks);
    take(at, buckets, numbers);
  }

 private:
  template <class T>
  static void take(char *&at, T *&array, int64_t count) {
    array = reinterpret_cast<T *>(at);
    at += count * static_cast<int64_t>(sizeof(T));
  }
};

class Row {
 public:
  Row(const ost_sampling &op, int64_t row)
      : width_(op.width), chunks_((op.width + kChunk - 1) / kChunk), scratch(chunks_), dtype_(op.dtype),
        data_(static_cast<const char *>(op.logits.data) +
              row * op.logits.stride * ost::bytes_of(op.dtype)) {}

  // Reads the logits as they are.
  void load() {
    if (dtype_ == OST_FLOAT32)
      std::memcpy(scratch.scores, data_, sizeof(float) * static_cast<size_t>(width_));
    else if (dtype_ == OST_BFLOAT16)
      widen([](const uint16_t *halves) { return ost::load_bfloat16(halves); });
    else
      widen([](const uint16_t *halves) { return ost::load_float16(halves); });
    for (int64_t i = width_; i < chunks_ * kChunk; ++i)
      scratch.scores[i] = -std::numeric_limits<float>::infinity();
  }

  // Finds the best score of each chunk; false where the row's is not finite, or there is a NaN.
  bool survey() {
    Extremes<int32_t> all;
    for (int64_t c = 0; c < chunks_; ++c) {
      int32_t numbers[kChunk];
      std::memcpy(numbers, chunk(c), sizeof numbers);
      const Extremes<int32_t> part = extremes(numbers, kChunk);
      scratch.best[c] = part.best;
      if (part.best > all.best) all.best = part.best;
      if (part.size > all.size) all.size = part.size;
    }
    best_ = all.best;
    return all.size <= kInfinity && best_ < kInfinity && best_ > -kInfinity;
  }

  float best() const { return key_of(best_, 0).score(); }
  float logit(int64_t id) const { return ost::load_element(data_, dtype_, id); }
  int64_t width() const { return width_; }
  int64_t chunks() const { return chunks_; }
  const float *chunk(int64_t c) const { return scratch.scores + c * kChunk; }
  bool reaches(int64_t c, Key last) const { return !(last < key_of(scratch.best[c], 0)); }
  float best_of(int64_t c) const { return key_of(scratch.best[c], 0).score(); }

  // The first of the most likely.
  int64_t argmax() const {
    int64_t c = 0;
    while (scratch.best[c] != best_) ++c;
    int64_t i = 0;
    while (order_of(chunk(c)[i]) != best_) ++i;
    return c * kChunk + i;
  }

  // The count best tokens, in no order, in scratch.keys; the last of them stands at its place. Tokens below the
  // best of count chunks cannot be among them.
  Key select(int64_t count) const {
    int32_t floor = std::numeric_limits<int32_t>::min();
    if (count <= chunks_) {
      for (int64_t c = 0; c < chunks_; ++c) scratch.orders[c].value = scratch.best[c];
      std::nth_element(scratch.orders, scratch.orders + count - 1, scratch.orders + chunks_);
      floor = scratch.orders[count - 1].value;
    }
    int64_t size = 0;
    for (int64_t c = 0; c < chunks_; ++c) {
      if (scratch.best[c] < floor) continue;
      const float *scores = chunk(c);
      const int64_t first = c * kChunk, number = width_ - first < kChunk ? width_ - first : kChunk;
      for (int64_t i = 0; i < number; ++i) {
        const int32_t order = order_of(scores[i]);
        scratch.keys[size] = key_of(order, first + i);
        size += order >= floor;
      }
    }
    std::nth_element(scratch.keys, scratch.keys + count - 1, scratch.keys + size);
    return scratch.keys[count - 1];
  }

  // Sets the masses of a chunk's tokens beyond a key to zero.
  void drop_beyond(int64_t c, Key last, int64_t *masses) const {
    const int32_t floor = last.order();
    const int32_t places = static_cast<int32_t>(last.id() - c * kChunk);  // of which the last one is kept
    for (int32_t i = 0; i < kChunk; ++i) {
      const int32_t order = order_of(chunk(c)[i]);
      masses[i] &= -static_cast<int64_t>((order > floor) | ((order == floor) & (i <= places)));
    }
  }

  // How many tokens are more likely than one, or as likely with a lower id; plus 1.
  int64_t rank(int64_t id) const {
    const Key own = key_of(order_of(logit(id)), id);
    int64_t rank = 1;
    for (int64_t c = 0; c < chunks_; ++c) {
      if (!reaches(c, own)) continue;
      const int64_t first = c * kChunk;
      int32_t before = 0;
      for (int64_t i = 0; i < kChunk; ++i) {
        const int32_t order = order_of(chunk(c)[i]);
        before += (order > own.order()) | ((order == own.order()) & (first + i < id));
      }
      rank += before;
    }
    return rank;
  }

 private:
  template <class Load>
  void widen(Load load) {
    const auto *halves = reinterpret_cast<const uint16_t *>(data_);
    int64_t i = 0;
    for (; i + 16 <= width_; i += 16) ost::store(scratch.scores + i, load(halves + i));
    for (; i < width_; ++i) scratch.scores[i] = logit(i);
  }

  int64_t width_, chunks_;

 public:
  Scratch scratch;

 private:
  int32_t dtype_;
  const char *data_;
  int32_t best_ = 0;
};

}  // namespace
