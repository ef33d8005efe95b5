// Packing rows of blocks, numbers or codes into tiles of codes; see weights/tiles.h and weights/code_rows.h.
//
// A unit is a tile. Its rows go side by side, a chunk of 32 inputs at a time, so that what a chunk
// writes stays in the level 1 cache: 512 bytes of 4 bits, 1,024 of 8.
#include <algorithm>
#include <type_traits>

#include "weights/code_rows.h"
#include "weights/scale_tiles.h"
#include "weights/tiles.h"
#include "threads/work.h"

namespace ost {

namespace {

constexpr int64_t kStep = 8;  // inputs of a word of 4 bits

// Eight codes as four bytes: inputs 0 and 2, 4 and 6, 1 and 3, 5 and 7.
inline uint32_t word_of(const uint8_t *codes) {
  uint64_t eight;
  std::memcpy(&eight, codes, sizeof eight);
  const uint64_t pairs = eight | eight >> 12;
  return static_cast<uint32_t>((pairs & 0xff) | (pairs >> 24 & 0xff00) | (pairs << 8 & 0xff0000) |
                               (pairs >> 16 & 0xff000000));
}

// One chunk of some of a tile.
struct ChunkPlace {
  uint8_t *tile;
  int64_t index, count;
};

inline void put_nibbles(const uint8_t *codes, int64_t output, const ChunkPlace &place) {
  uint8_t *chunk = place.tile + place.index * kChunk * kTileOutputs / 2;
  for (int64_t step = 0; step < kChunk / kStep; ++step) {
    const uint32_t word = word_of(codes + step * kStep);
    std::memcpy(chunk + (step * kTileOutputs + output) * 4, &word, sizeof word);
  }
}

inline void put_code_bytes(const uint8_t *codes, int64_t output, const ChunkPlace &place) {
  uint8_t *chunk = place.tile + place.index * kChunk * kTileOutputs;
  for (int64_t pair = 0; pair < kChunk / 2; ++pair)
    std::memcpy(chunk + (pair * kTileOutputs + output) * 2, codes + pair * 2, 2);
}

inline void put_byte_blocks(const uint8_t *codes, int64_t output, const ChunkPlace &place) {
  const int64_t chunks = output / 16 * place.count + place.index;
  uint8_t *to = place.tile + chunks * kChunk * 16 + output % 16 * kStep;
  for (int64_t step = 0; step < kChunk / kStep; ++step)
    std::memcpy(to + step * 16 * kStep, codes + step * kStep, kStep);
}

// The other half of a byte is another output's.
inline void put_nibble_blocks(const uint8_t *codes, int64_t output, const ChunkPlace &place) {
  const int64_t chunks = output / 16 * place.count + place.index, own = output % 16;
  const int shift = own < 8 ? 0 : 4;
  uint8_t *to = place.tile + chunks * kChunk * 8 + own % 8 * kStep;
  for (int64_t step = 0; step < kChunk / kStep; ++step, to += 8 * kStep) {
    uint64_t both, eight;
    std::memcpy(&both, to, sizeof both);
    std::memcpy(&eight, codes + step * kStep, sizeof eight);
    both = (both & 0xf0f0f0f0f0f0f0f0 >> shift) | eight << shift;
    std::memcpy(to, &both, sizeof both);
  }
}

template <class Kind>
class TilePacking {
 public:
  TilePacking(const ost_code_packing &p, int64_t tile)
      : p_(p), first_(std::max(p.first_output, tile * kTileOutputs)),
        last_(std::min(p.first_output + p.num_rows, (tile + 1) * kTileOutputs)),
        num_chunks_(round_up(p.num_inputs, kInputsPerStep) / kChunk),
        num_groups_((p.num_inputs + p.group_size - 1) / p.group_size) {
    const int64_t chunk_bytes = kChunk * kTileOutputs * (is_small() ? 4 : 8) / 8;
    tiles_ = static_cast<uint8_t *>(p.tiles) + tile * num_chunks_ * chunk_bytes;
    scales_ = tile * num_groups_ * kTileOutputs;
    for (int64_t output = first_; output < last_; ++output) {
      const int64_t row = output - p.first_output;
      rows_[output - first_] = static_cast<const uint8_t *>(p.rows) +
                               (p.order == nullptr ? row : p.order[row]) * p.row_bytes;
    }
  }

  void pack() {
    constexpr int32_t kLess = Kind::kBits == 4 ? Kind::kZero : 0;  // of codes that become signed bytes
    const bool is_in_blocks = in_blocks(p_.weight_format);
    for (int64_t c = 0; c < num_chunks_; ++c) {
      begin_chunk(c);
      if (is_small()) is_in_blocks ? put<put_nibble_blocks, 0>(c) : put<put_nibbles, 0>(c);
      else is_in_blocks ? put<put_byte_blocks, kLess>(c) : put<put_code_bytes, kLess>(c);
    }
  }

 private:
  bool is_small() const { return bits_of_codes(p_.weight_format) == 4; }

  // Groups that begin with it: one, or two of 16 inputs.
  void begin_chunk(int64_t chunk) {
    const int64_t first_input = chunk * kChunk;
    if (first_input % p_.group_size != 0) return;
    for (int64_t i = 0; i < last_ - first_; ++i)
      groups_[i] = Kind::begin(p_, rows_[i], chunk);
    if (p_.scales == nullptr) return;
    const int64_t num_parts = std::max<int64_t>(1, kChunk / p_.group_size);
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t group = first_input / p_.group_size + part;
      const int64_t place = scales_ + group * kTileOutputs + first_ % kTileOutputs;
      for (int64_t i = 0; i < last_ - first_; ++i) put_scale(place + i, part, groups_[i]);
    }
  }

  void put_scale(int64_t place, int64_t part, const typename Kind::Scale &own) {
    if (p_.scale_dtype != OST_SUPERBLOCKS) {
      const GroupScale group = own.of_part(part);
      store_element(p_.scales, p_.scale_dtype, place, group.scale);
      if (p_.minima != nullptr) store_element(p_.minima, p_.scale_dtype, place, group.minimum);
    } else if constexpr (std::is_same_v<typename Kind::Scale, SuperScale>) {
      put_bytes(p_.scales, place, own.factor, own.scales[part]);
      if (p_.minima != nullptr) put_bytes(p_.minima, place, own.minimum_factor, own.minima[part]);
    }
  }

  void put_bytes(void *tiles, int64_t place, uint16_t factor, int8_t byte) {
    const SuperblockPlace at(place, p_.group_size);
    std::memcpy(static_cast<char *>(tiles) + at.factors, &factor, sizeof factor);
    std::memcpy(static_cast<char *>(tiles) + at.bytes, &byte, sizeof byte);
  }

  template <void (*kPut)(const uint8_t *, int64_t, const ChunkPlace &), int32_t kLess>
  void put(int64_t c) {
    uint8_t codes[kChunk];
    for (int64_t i = 0; i < last_ - first_; ++i) {
      Kind::codes(p_, rows_[i], c, groups_[i], codes);
      if constexpr (kLess != 0)
        for (uint8_t &code : codes) code = static_cast<uint8_t>(code - kLess);
      kPut(codes, (first_ + i) % kTileOutputs, {tiles_, c, num_chunks_});
    }
  }

  const ost_code_packing &p_;
  const int64_t first_, last_, num_chunks_, num_groups_;
  int64_t scales_;
  uint8_t *tiles_;
  const uint8_t *rows_[kTileOutputs];
  typename Kind::Scale groups_[kTileOutputs];
};

template <class Kind>
void pack_tiles(const void *record, int64_t first, int64_t last) {
  const auto &p = *static_cast<const ost_code_packing *>(record);
  const int64_t begin = p.first_output / kTileOutputs;
  for (int64_t tile = begin + first; tile < begin + last; ++tile)
    TilePacking<Kind>(p, tile).pack();
}

using Packer = void (*)(const void *, int64_t, int64_t);

// In the order of ost_row_kind.
constexpr Packer kPackers[] = {pack_tiles<Codes>, pack_tiles<Numbers>, pack_tiles<Q40>,
                               pack_tiles<Q41>,   pack_tiles<Q50>,     pack_tiles<Q51>,
                               pack_tiles<Q80>,   pack_tiles<Q4K>,     pack_tiles<Q5K>,
                               pack_tiles<Q6K>,   pack_tiles<Q2K>,     pack_tiles<Q3K>,
                               pack_tiles<IQ4NL>, pack_tiles<IQ4XS>,   pack_tiles<MXFP4<false>>,
                               pack_tiles<MXFP4<true>>};

}  // namespace

}  // namespace ost

extern "C" void ost_pack_codes(const ost_code_packing *packing) {
  const ost_code_packing &p = *packing;
  if (p.num_rows == 0) return;
  const int64_t num_units =
      ost::num_tiles(p.first_output + p.num_rows) - p.first_output / ost::kTileOutputs;
  ost::run_work({&p, ost::kPackers[p.row_kind], num_units, 1}, p.num_threads);
}
