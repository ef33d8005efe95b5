// Random cases: numbers from a seed, arrays of any format, and a way to fail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "simd/formats.h"
#include "guarded.h"
#include "kv/layout.h"

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  // A whole number, both ends included.
  int32_t between(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(engine_); }
  float normal() { return std::normal_distribution<float>()(engine_); }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[between(0, static_cast<int32_t>(from.size()) - 1)];
  }
  template <class T>
  void shuffle(std::vector<T> &items) {
    std::shuffle(items.begin(), items.end(), engine_);
  }

 private:
  std::mt19937 engine_;
};

// (tokens, heads, size) in a format, with strides that leave gaps.
class Tensor {
 public:
  Tensor(int32_t tokens, int32_t heads, int32_t size, int32_t dtype, int32_t gap)
      : bytes_(extent(tokens, heads, size, gap) * ost::bytes_of(dtype)) {
    const int64_t head_stride = size + gap;
    rows = {bytes_.data(), head_stride * heads + gap, head_stride, dtype};
    std::memset(bytes_.data(), 0xff, bytes_.size());  // NaN in every format
  }
  int64_t place(int32_t token, int32_t head, int32_t d) const {
    return token * rows.token_stride + head * rows.head_stride + d;
  }
  double at(int32_t token, int32_t head, int32_t d) const {
    return ost::load_element(rows.data, rows.dtype, place(token, head, d));
  }
  void set(int32_t token, int32_t head, int32_t d, float value) {
    ost::store_element(rows.data, rows.dtype, place(token, head, d), value);
  }

  ost_rows rows;

 private:
  static int64_t extent(int64_t tokens, int64_t heads, int64_t size, int64_t gap) {
    return (tokens - 1) * ((size + gap) * heads + gap) + (heads - 1) * (size + gap) + size;
  }
  Guarded<char> bytes_;
};

// A layer's keys and values, NaN wherever nobody has written.
class Store {
 public:
  Store(int64_t num_blocks, int32_t dtype, int32_t heads, int32_t key_dim, int32_t value_dim,
        int32_t block_size)
      : kv{nullptr, nullptr, num_blocks, dtype, heads, key_dim, value_dim, block_size},
        keys_(groups() * ost::key_group_size(kv) * ost::bytes_of(dtype)),
        values_(groups() * ost::value_group_size(kv) * ost::bytes_of(dtype)) {
    kv.keys = keys_.data();
    kv.values = values_.data();
    std::memset(keys_.data(), 0xff, keys_.size());
    std::memset(values_.data(), 0xff, values_.size());
  }
  // What the layout says is there.
  double key(int64_t slot, int32_t head, int32_t d) const {
    const int64_t group = ost::key_group(kv, slot / kv.block_size, head, slot % kv.block_size);
    const int64_t lane = slot % ost::kGroup;
    return element(kv.keys, group, ost::key_place(ost::has_pairs(kv), lane, d), lane);
  }
  double value(int64_t slot, int32_t head, int32_t d) const {
    const int64_t group = ost::value_group(kv, slot / kv.block_size, head, slot % kv.block_size);
    const int64_t lane = slot % ost::kGroup;
    return element(kv.values, group,
                   ost::value_place(ost::has_pairs(kv), kv.value_dim, lane, d), lane);
  }

  ost_kv kv;

 private:
  int64_t groups() const { return kv.num_blocks * kv.num_kv_heads * kv.block_size / ost::kGroup; }
  double element(const void *data, int64_t group, int64_t place, int64_t lane) const {
    if (!ost::has_scales(kv)) return ost::load_element(data, kv.dtype, group + place);
    const int8_t *codes = static_cast<const int8_t *>(data) + group;
    return static_cast<double>(codes[place]) * ost::scales_of(codes)[lane];
  }
  Guarded<char> keys_, values_;
};

inline const char *name_of_isa(int32_t isa) {
#if defined(__aarch64__)
  static const char *const names[] = {"generic", "NEON", "NEON with SDOT", "NEON with I8MM",
                                      "NEON with BF16"};
#else
  static const char *const names[] = {"generic", "AVX2", "AVX-512", "AVX-512 BF16", "AMX"};
#endif
  return names[isa];
}

// Whether an instruction set of x86-64 is in use, or one that contains it; ARM's have the same numbers.
inline bool uses_x86([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
  return ost_current_isa() >= isa;
#else
  return false;
#endif
}

[[noreturn]] inline void fail(uint32_t seed, const char *what) {
  std::fprintf(stderr, "seed %u, %s: %s\n", seed, name_of_isa(ost_current_isa()), what);
  std::exit(1);
}
