// Softmax of a tile: scores of 32 rows and 32 keys become weights, between two products of tiles.
//
// Two rows at a time, as soon as their scores are there: they never leave the level 1 cache. So the
// maximum of a chunk is not known, and a row keeps an old one until a score exceeds it by so much that
// its weight would be too large; sums and weights are to whatever it is (the lazy rescaling of
// FlashAttention 4). Since it is a whole number, no bit hangs on which.
//
// Included after attention/tile.h.
#pragma once

namespace ost {
namespace {

constexpr int kTallRows = 32;
constexpr int kPair = 2 * kGroup;  // keys whose scores are computed at a time
constexpr int kMaxPairs = kChunkGroups / 2;
constexpr float kMaxWeight = 65536.0f;  // of two keys; above it a row's maximum is renewed

// The tile instructions do not tell the compiler which memory they read and write.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Two times 16 numbers side by side, each rounded to the nearest.
inline void store_two(uint16_t *p, Vec a, Vec b) {
  const __m512bh pair = _mm512_cvtne2ps_pbh(b.v, a.v);
  std::memcpy(p, &pair, sizeof pair);
}

// Up to 32 rows over a chunk. Its pairs of groups begin at even ones.
struct Tile {
  Rows<uint16_t> rows;
  int32_t num_rows, first_pair, last_pair;
  int32_t whole_from, whole_to;  // pairs whose keys all rows see
  bool is_fresh;                 // whether some have no maximum yet
  float *max, *sums;         // those of the rows, or, if they are less than 32, copies
  float own_max[kTallRows];
  alignas(64) float own_sums[kTallRows * kGroup];
  alignas(64) uint16_t weights[kMaxPairs][kTallRows][kPair];

  void begin(const Chunk<uint16_t> &chunk, const Rows<uint16_t> &these, int32_t count) {
    rows = these;
    num_rows = count;
    int32_t low = INT32_MAX, high = 0, from = 0, to = INT32_MAX;
    bool fresh = false;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t first = rows.first[i], last = rows.last[i];
      const bool sees = first < last;
      low = sees && first < low ? first : low;
      high = sees && last > high ? last : high;
      from = first > from ? first : from;
      to = last < to ? last : to;
      fresh |= rows.max[i] == kLowest;
    }
    low = low > chunk.first ? low - chunk.first : 0;
    high = high > chunk.first ? high - chunk.first : 0;
    const int32_t end = (chunk.num_groups + 1) / 2;
    first_pair = low / kPair;
    last_pair = (high + kPair - 1) / kPair;
    if (last_pair > end) last_pair = end;
    if (first_pair > last_pair) first_pair = last_pair;
    const int32_t last_key = chunk.first + chunk.num_groups * kGroup;
    to = to < last_key ? to : last_key;
    whole_from = from > chunk.first ? (from - chunk.first + kPair - 1) / kPair : 0;
    whole_to = to > chunk.first ? (to - chunk.first) / kPair : 0;
    is_fresh = fresh;
    max = rows.max;
    sums = rows.sums;
    if (count == kTallRows) return;
    max = own_max;
    sums = own_sums;
    for (int32_t i = 0; i < kTallRows; ++i) own_max[i] = i < count ? rows.max[i] : -kMasked;
    std::memcpy(sums, rows.sums, count * kGroup * sizeof(float));
  }
  bool is_whole(int32_t pair) const { return pair >= whole_from && pair < whole_to; }
  void end() const {
    if (num_rows == kTallRows) return;
    std::memcpy(rows.max, own_max, num_rows * sizeof(float));
    std::memcpy(rows.sums, own_sums, num_rows * kGroup * sizeof(float));
  }
};

// A walk along the rows of a tile, and the scores of one pair of groups. It is copied into registers
// for a while, hence no pointer to it.
struct Weigher {
  const float *scores, *max;
  float *sums;
  uint16_t *weights;
  int32_t num_rows, left;  // even numbers
  uint32_t late;           // bit i: rows i and i + 1 exceed their maxima, and wait
  float scale;

  __attribute__((always_inline)) Vec weight(const float *from, Vec top) const {
    return power_of_two<3>(load(from) * fill(scale), top);
  }
  template <bool kMayWait>
  __attribute__((always_inline)) void weigh_two() {
    const Vec top = fill(max[0]), next_top = fill(max[1]);
    const Vec a = weight(scores, top), b = weight(scores + kGroup, top);
    const Vec c = weight(scores + kPair, next_top), d = weight(scores + kPair + kGroup, next_top);
    const Vec above = a + b, below = c + d, limit = fill(kMaxWeight);
    if (kMayWait && __builtin_expect(
                        _mm512_cmp_ps_mask(larger(above, below).v, limit.v, _CMP_GT_OQ) != 0, 0)) {
      late |= 1u << (num_rows - left);
    } else {
      store_two(weights, a, b);
      store_two(weights + kPair, c, d);
      store(sums, load(sums) + above);
      store(sums + kGroup, load(sums + kGroup) + below);
    }
    scores += 2 * kPair;
    max += 2;
    sums += 2 * kGroup;
    weights += 2 * kPair;
    left -= 2;
  }
};

// Scores of a tile's rows and 32 keys that become weights, and what is done about them besides.
class Weighing {
 public:
  Weighing(const Chunk<uint16_t> &chunk, const Setting &setting)
      : chunk_(chunk), setting_(setting), scale_(setting.soft_cap > 0 ? 1.0f : setting.scale) {}

  Weigher weigher{};

  // Room for the next scores, while the last ones are still being weighed.
  float *room() { return scores_[turn_]; }

  // The scores in the room are those of a tile and a pair of groups.
  void begin(Tile *tile, int32_t pair) {
    float *scores = scores_[turn_];
    turn_ = 1 - turn_;
    if (!tile->is_whole(pair) || setting_.soft_cap > 0) hide(*tile, pair, scores);
    if (tile->num_rows % 2 != 0) forget(scores + tile->num_rows * kPair);
    if (tile->is_fresh && pair == tile->first_pair) meet(*tile, pair, scores);
    tile_ = tile;
    pair_ = pair;
    const int32_t rows = (tile->num_rows + 1) / 2 * 2;
    weigher = {scores, tile->max, tile->sums, tile->weights[pair][0], rows, rows, 0, scale_};
  }
  bool is_of(const Tile *tile) const { return tile_ == tile; }
  // Until all are weights.
  void finish() {
    if (tile_ == nullptr) return;
    while (weigher.left > 0) weigher.weigh_two<true>();
    if (weigher.late != 0) weigh_late(*tile_, pair_, weigher.late, scores_[1 - turn_]);
    tile_ = nullptr;
  }

 private:
  // Behind the last row is nobody's, or another's: whatever it scores, its neighbour does not wait.
  static void forget(float *scores) {
    store(scores, fill(kMasked));
    store(scores + kGroup, fill(kMasked));
  }
  // Rows whose scores exceed their maxima.
  __attribute__((noinline)) void weigh_late(Tile &tile, int32_t pair, uint32_t late,
                                            const float *scores) const {
    for (int32_t i = 0; i < tile.num_rows; i += 2) {
      if (!(late >> i & 1)) continue;
      renew(tile, i, pair, scores + i * kPair);
      if (i + 1 < tile.num_rows) renew(tile, i + 1, pair, scores + (i + 1) * kPair);
      Weigher two{scores + i * kPair, tile.max + i, tile.sums + i * kGroup, tile.weights[pair][i],
                  2, 2, 0, scale_};
      two.weigh_two<false>();
    }
  }
  // Rows that have no maximum yet get one.
  __attribute__((noinline)) void meet(Tile &tile, int32_t pair, const float *scores) const {
    for (int32_t i = 0; i < tile.num_rows; ++i)
      if (tile.max[i] == kLowest) renew(tile, i, pair, scores + i * kPair);
  }
  // A row's maximum becomes the largest of these scores, and all that it has gathered shrinks.
  void renew(Tile &tile, int32_t i, int32_t pair, const float *scores) const {
    const float top = std::ceil(largest_score(scores, 2) * scale_), old = tile.max[i];
    if (!(top > old)) return;
    tile.max[i] = top;
    if (old == kLowest) return;
    const float keep = power_of_whole(old - top);
    scale_row(tile.sums + i * kGroup, kGroup, keep);
    scale_row(tile.rows.weighted + int64_t{i} * setting_.value_stride, setting_.value_stride, keep);
    for (int32_t p = tile.first_pair; p < pair; ++p)
      for (uint16_t *w = tile.weights[p][i]; w < tile.weights[p][i] + kPair; w += kGroup)
        store_brain(w, load_bfloat16(w) * fill(keep));
  }
  // Caps scores, and takes those away that a row does not see.
  __attribute__((noinline)) void hide(const Tile &tile, int32_t pair, float *scores) const {
    const int32_t from = chunk_.first + pair * kPair;
    const int32_t end = chunk_.first + chunk_.num_groups * kGroup;
    for (int32_t i = 0; i < tile.num_rows; ++i) {
      if (setting_.soft_cap > 0) cap_scores(scores + i * kPair, 2, setting_);
      const int32_t last = tile.rows.last[i] < end ? tile.rows.last[i] : end;
      hide_unseen(scores + i * kPair, 2, tile.rows.first[i] - from, last - from);
    }
  }

  const Chunk<uint16_t> &chunk_;
  const Setting &setting_;
  const float scale_;  // of scores, to base 2; capped ones have it
  Tile *tile_ = nullptr;
  int32_t pair_ = 0, turn_ = 0;
  alignas(64) float scores_[2][kTallRows * kPair];
};

}  // namespace
}  // namespace ost
