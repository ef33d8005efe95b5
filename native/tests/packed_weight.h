// A weight as rows and in tiles, in arrays of any format.
#pragma once

#include <cstring>

#include "case.h"
#include "weights/tiles.h"

// Numbers of a format up to a page that must not be read.
struct Numbers {
  Numbers(int64_t size, int32_t dtype_) : dtype(dtype_), bytes(size * ost::bytes_of(dtype_)) {
    std::memset(bytes.data(), 0xff, bytes.size());  // NaN in every format
  }
  void set(int64_t i, float value) { ost::store_element(bytes.data(), dtype, i, value); }
  double at(int64_t i) const { return ost::load_element(data(), dtype, i); }
  int64_t size() const { return bytes.size() / ost::bytes_of(dtype); }
  void fill(Random &random) {
    for (int64_t i = 0; i < size(); ++i) set(i, random.normal());
  }
  void zero() { std::memset(bytes.data(), 0, bytes.size()); }
  bool same(const Numbers &other, int64_t first, int64_t other_first, int64_t count) const {
    const int64_t size = ost::bytes_of(dtype);
    return std::memcmp(bytes.data() + first * size, other.bytes.data() + other_first * size,
                       count * size) == 0;
  }
  void *data() const { return bytes.data(); }

  int32_t dtype;
  mutable Guarded<char> bytes;
};

// A plain weight, and the same in tiles: packed in two parts, as layers that share one are.
struct Weight {
  Weight(Random &random, int32_t num_outputs_, int32_t num_inputs_, int32_t dtype)
      : num_outputs(num_outputs_), num_inputs(num_inputs_),
        plain(int64_t{num_outputs_} * num_inputs_, dtype),
        tiles(ost_packed_size(num_outputs_, num_inputs_), dtype) {
    plain.fill(random);
    tiles.zero();
    const int32_t first = random.between(0, num_outputs);
    for (const auto &part : {packing(plain, 0, first), packing(plain, first, num_outputs)})
      ost_pack(&part);
  }
  // Rows first .. last - 1, in an array of all.
  ost_packing packing(Numbers &rows, int64_t first, int64_t last) {
    char *data = static_cast<char *>(rows.data()) + first * num_inputs * ost::bytes_of(rows.dtype);
    return {tiles.data(), {data, num_inputs}, first, last - first, num_inputs, rows.dtype, 2};
  }
  int64_t padded_inputs() const { return ost::round_up(num_inputs, 32); }

  int32_t num_outputs, num_inputs;
  Numbers plain, tiles;
};
