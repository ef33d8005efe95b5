// Changes the scores of one row before a token is chosen: only those of the tokens that are named.
#pragma once

#include <limits>

#include "ops/vector.h"
#include "ostinato_sampling.h"

namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

inline bool has_edits(const ost_sample_row &row) {
  return row.num_biases > 0 || row.num_banned > 0 || row.masks[0] != nullptr ||
         row.masks[1] != nullptr || row.masks[2] != nullptr || row.repetition != 1 ||
         row.frequency != 0 || row.presence != 0;
}

// Counts start at zero for the tokens that are counted; what others have is never read.
inline void clear_counts(const uint32_t *tokens, int64_t number, int64_t width, int32_t *counts) {
  for (int64_t i = 0; i < number; ++i)
    if (tokens[i] < width) counts[tokens[i]] = 0;
}

inline void penalise_repetition(const ost_sample_row &row, float *scores, int64_t width,
                                int32_t *counts) {
  const struct {
    const uint32_t *tokens;
    int64_t number;
  } texts[] = {{row.prompt, row.num_prompt}, {row.output, row.num_output}};
  for (const auto &text : texts) clear_counts(text.tokens, text.number, width, counts);
  for (const auto &text : texts)
    for (int64_t i = 0; i < text.number; ++i) {
      const uint32_t token = text.tokens[i];
      if (token >= width || counts[token]++ > 0) continue;
      scores[token] = scores[token] > 0 ? scores[token] / row.repetition : scores[token] * row.repetition;
    }
}

inline void penalise_output(const ost_sample_row &row, float *scores, int64_t width, int32_t *counts) {
  clear_counts(row.output, row.num_output, width, counts);
  for (int64_t i = 0; i < row.num_output; ++i)
    if (row.output[i] < width) ++counts[row.output[i]];
  for (int64_t i = 0; i < row.num_output; ++i) {
    const uint32_t token = row.output[i];
    if (token >= width || counts[token] == 0) continue;
    scores[token] -= row.frequency * static_cast<float>(counts[token]) + row.presence;
    counts[token] = 0;
  }
}

// Bit number i in lane i.
inline Words lane_bits() {
  Words bits;
  for (int lane = 0; lane < kLanes; ++lane) bits[lane] = 1u << lane;
  return bits;
}

inline void keep_ids(const uint8_t *mask, float *scores, int64_t width) {
  const int64_t whole = width / 16 * 16;
  for (int64_t first = 0; first < whole; first += 16) {
    const uint32_t bits = mask[first / 8] | static_cast<uint32_t>(mask[first / 8 + 1]) << 8;
    if (bits == 0xffff) continue;
    for (int i = 0; i < 16; i += kLanes) {
      const Ints is_kept = ((Words{} + bits) & (lane_bits() << i)) != 0;
      const Floats kept = load<Float32>(scores + first + i);
      store<Float32>(scores + first + i, is_kept ? kept : all(kBanned));
    }
  }
  for (int64_t i = whole; i < width; ++i)
    if ((mask[i / 8] >> (i % 8) & 1) == 0) scores[i] = kBanned;
}

inline void edit(const ost_sample_row &row, float *scores, int64_t width, int32_t *counts) {
  for (int64_t i = 0; i < row.num_biases; ++i) scores[row.bias_ids[i]] += static_cast<float>(row.biases[i]);
  if (row.repetition != 1) penalise_repetition(row, scores, width, counts);
  if (row.frequency != 0 || row.presence != 0) penalise_output(row, scores, width, counts);
  for (const uint8_t *mask : row.masks)
    if (mask != nullptr) keep_ids(mask, scores, width);
  for (int64_t i = 0; i < row.num_banned; ++i)
    if (row.banned[i] < width) scores[row.banned[i]] = kBanned;
}

}  // namespace
