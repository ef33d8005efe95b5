// The formats in which a product's rows are given and its outputs are written.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd/simd.h"
// after it
#include "weights/tiles.h"

namespace ost {
namespace {

struct Float32Numbers {
  using Stored = float;
  static Vec load_numbers(const float *from) { return load(from); }
  static void store_numbers(float *to, const Vec &value) { store(to, value); }
};

struct Float16Numbers {
  using Stored = uint16_t;
  static Vec load_numbers(const uint16_t *from) { return load_float16(from); }
  static void store_numbers(uint16_t *to, const Vec &value) { store_float16(to, value); }
};

struct BFloat16Numbers {
  using Stored = uint16_t;
  static Vec load_numbers(const uint16_t *from) { return load_bfloat16(from); }
  static void store_numbers(uint16_t *to, const Vec &value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value.v)));
#else
    store_bfloat16(to, value);
#endif
  }
};

// Writes finished sums of 16 outputs from `output` on, with their bias.
template <class Numbers>
inline void put(const ost_product &p, int64_t row, int64_t output, Vec value) {
  using Stored = typename Numbers::Stored;
  const int64_t left = std::min<int64_t>(16, p.num_outputs - output);
  if (left <= 0) return;
  const auto *bias = static_cast<const Stored *>(p.bias);
  auto *to = static_cast<Stored *>(p.outputs.data) + row * p.outputs.stride + output;
  if (left == 16) {
    if (bias != nullptr) value = value + Numbers::load_numbers(bias + output);
    return Numbers::store_numbers(to, value);
  }
  Stored buffer[16] = {};
  if (bias != nullptr) {
    std::memcpy(buffer, bias + output, static_cast<size_t>(left) * sizeof(Stored));
    value = value + Numbers::load_numbers(buffer);
  }
  Numbers::store_numbers(buffer, value);
  std::memcpy(to, buffer, static_cast<size_t>(left) * sizeof(Stored));
}

}  // namespace
}  // namespace ost
