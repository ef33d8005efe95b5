// Copying rows of a plain weight into tiles, and back; see weights/tiles.h.
#include <algorithm>
#include <cstring>

#include "simd/formats.h"
#include "weights/tiles.h"
#include "threads/work.h"

namespace ost {

namespace {

// Inputs that are copied for all outputs of a tile before the next ones: they stay in the level 1 cache.
constexpr int64_t kBlockInputs = 32;

struct Span {
  int64_t first, last;
};

// Outputs of a tile that are among the rows of the record.
Span outputs_of(const ost_packing &p, int64_t tile) {
  return {std::max(p.first_output, tile * kTileOutputs),
          std::min(p.first_output + p.num_rows, (tile + 1) * kTileOutputs)};
}

// Number is what is copied at once: an element, or the pair that stands together.
template <class Number, bool kPack>
void copy_block(const ost_packing &p, int64_t tile, int64_t first, int64_t last) {
  const int64_t per_number = inputs_per_pack(p.dtype);
  const int64_t padded = round_up(p.num_inputs, kInputsPerStep) / per_number;
  const Span outputs = outputs_of(p, tile);
  auto *tiles = static_cast<Number *>(p.tiles) + tile * kTileOutputs * padded;
  for (int64_t output = outputs.first; output < outputs.last; ++output) {
    char *row = static_cast<char *>(p.rows.data) +
                (output - p.first_output) * p.rows.stride * bytes_of(p.dtype);
    Number *column = tiles + output % kTileOutputs;
    for (int64_t i = first; i < last; ++i) {
      char *plain = row + i * static_cast<int64_t>(sizeof(Number));
      if constexpr (kPack)
        std::memcpy(column + i * kTileOutputs, plain, sizeof(Number));
      else
        std::memcpy(plain, column + i * kTileOutputs, sizeof(Number));
    }
  }
}

// The last input of an odd number of bfloat16.
template <bool kPack>
void copy_last_input(const ost_packing &p, int64_t tile) {
  const int64_t padded = round_up(p.num_inputs, kInputsPerStep), input = p.num_inputs - 1;
  auto *tiles = static_cast<uint16_t *>(p.tiles);
  const Span outputs = outputs_of(p, tile);
  for (int64_t output = outputs.first; output < outputs.last; ++output) {
    uint16_t &plain = static_cast<uint16_t *>(
        p.rows.data)[(output - p.first_output) * p.rows.stride + input];
    uint16_t &packed = tiles[place_in_tiles(p.dtype, padded, output, input)];
    kPack ? packed = plain : plain = packed;
  }
}

template <class Number, bool kPack>
void copy_tile(const ost_packing &p, int64_t tile) {
  const int64_t per_number = inputs_per_pack(p.dtype), count = p.num_inputs / per_number;
  for (int64_t i = 0; i < count; i += kBlockInputs)
    copy_block<Number, kPack>(p, tile, i, std::min(count, i + kBlockInputs));
  if (p.num_inputs % per_number != 0) copy_last_input<kPack>(p, tile);
}

// A unit is a tile, counted from the one that holds the first row.
template <bool kPack>
void copy_tiles(const void *record, int64_t first, int64_t last) {
  const auto &p = *static_cast<const ost_packing *>(record);
  const int64_t begin = p.first_output / kTileOutputs;
  for (int64_t tile = begin + first; tile < begin + last; ++tile)
    p.dtype == OST_FLOAT16 ? copy_tile<uint16_t, kPack>(p, tile)
                           : copy_tile<uint32_t, kPack>(p, tile);
}

template <bool kPack>
void run(const ost_packing &p) {
  if (p.num_rows == 0) return;
  const int64_t num_units =
      num_tiles(p.first_output + p.num_rows) - p.first_output / kTileOutputs;
  run_work({&p, copy_tiles<kPack>, num_units, 1}, p.num_threads);
}

}  // namespace

}  // namespace ost

extern "C" {

int64_t ost_packed_size(int64_t num_outputs, int64_t num_inputs) {
  return ost::num_tiles(num_outputs) * ost::kTileOutputs *
         ost::round_up(num_inputs, ost::kInputsPerStep);
}

void ost_pack(const ost_packing *packing) { ost::run<true>(*packing); }

void ost_unpack(const ost_packing *packing) { ost::run<false>(*packing); }
}
