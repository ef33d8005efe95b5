// Quantizes rows of floats to integers with a scale for each row.
//
// Keys and values that are kept in 8 bits are codes with a scale for each token and head. Queries, and
// weights times the scales of values, become whole numbers of 16 bits for as long as they are multiplied
// with codes: their products are added up in 32 bits without rounding, in any order, by an instruction
// that every processor has (VPMADDWD, or VPDPWSSD). 16 bits are twice as exact as bfloat16.
//
// Included after one simd/*.h.
#pragma once

#include <cstring>

#include "simd/formats.h"
#include "simd/int16.h"

namespace ost {
namespace {

constexpr float kMaxCode = 127, kMaxInt16 = 32767;
constexpr float kSmallestSize = 1e-33f;  // below it numbers are 0, above it their step's inverse is finite

// The next 16 floats of a row of any format, with zeros behind its end.
inline Vec load_floats(const void *data, int32_t dtype, int64_t from, int32_t left) {
  if (left < 16) {
    float copy[16] = {};
    for (int32_t i = 0; i < left; ++i) copy[i] = load_element(data, dtype, from + i);
    return load(copy);
  }
  const uint16_t *halves = static_cast<const uint16_t *>(data) + from;
  if (dtype == OST_FLOAT32) return load(static_cast<const float *>(data) + from);
  return dtype == OST_BFLOAT16 ? load_bfloat16(halves) : load_float16(halves);
}

// The largest size seen so far; no number once one of those seen was not finite.
class LargestSize {
 public:
  void add(const Vec &x) {
    size_ = larger(size_, larger(x, fill(0.0f) - x));
    zero_ = multiply_add(x, fill(0.0f), zero_);
  }
  float get() const { return largest(size_) + total(zero_); }

 private:
  Vec size_ = fill(0.0f), zero_ = fill(0.0f);
};

// By what numbers of a size are multiplied to become whole ones up to most; their step is size / most.
inline Vec steps_per_unit(float size, float max_int) {
  return fill(size >= kSmallestSize ? max_int / size : 0.0f);
}

// A row as codes; returns their scale. Codes of a row that is not finite are any, and its scale is no number.
inline float store_codes(const void *data, int32_t dtype, int64_t from, int32_t dim, int8_t *codes) {
  LargestSize size;
  for (int32_t d = 0; d < dim; d += 16) size.add(load_floats(data, dtype, from + d, dim - d));
  const Vec by = steps_per_unit(size.get(), kMaxCode);
  for (int32_t d = 0; d < dim; d += 16) {
    int8_t next[16];
    store_int8(next, load_floats(data, dtype, from + d, dim - d) * by);
    std::memcpy(codes + d, next, dim - d < 16 ? dim - d : 16);
  }
  return size.get() / kMaxCode;
}

// A row as whole numbers whose products with dim codes fit 32 bits; returns what one of them is worth.
inline float store_whole(const void *data, int32_t dtype, int64_t from, int32_t dim, int16_t *whole) {
  const float room = 2147483647.0f / (kMaxCode * 1.001f * dim);
  const float max_int = room < kMaxInt16 ? room : kMaxInt16;
  LargestSize size;
  for (int32_t d = 0; d < dim; d += 16) size.add(load_floats(data, dtype, from + d, dim - d));
  const Vec by = steps_per_unit(size.get(), max_int);
  for (int32_t d = 0; d < dim; d += 16) {
    int16_t next[16];
    store_int16(next, load_floats(data, dtype, from + d, dim - d) * by);
    std::memcpy(whole + d, next, (dim - d < 16 ? dim - d : 16) * sizeof(int16_t));
  }
  return size.get() / max_int;
}

}  // namespace
}  // namespace ost
