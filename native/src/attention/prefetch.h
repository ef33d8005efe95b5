// Prefetches the keys and values that a task reads next.
//
// Blocks lie anywhere, so a processor sees no further than the end of one. A task knows what it reads:
// a chunk's keys, its values, the next chunk, the next segment, and at last the task that its thread has
// taken next. Each read of a line prefetches the line that is kLeadBytes further along that way. So memory
// is busy while products and weights are computed, and short tails and the beginnings of tasks are
// there in time.
//
// Included after one simd/*.h.
#pragma once

#include "attention/kernels.h"
#include "kv/layout.h"

namespace ost {
namespace {

constexpr int32_t kMaxRows = 512;  // rows at once: their queries and sums stay in a level 2 cache
constexpr int kChunkGroups = 16;   // most groups of keys that are looked at in one go

// With few rows, memory decides: what is read and what was asked for stay in a small level 2 cache. With
// many, a row's sums are fetched and put back once per chunk, and that costs more.
inline int32_t chunk_groups(int64_t num_rows) { return num_rows > 64 ? kChunkGroups : 8; }

// Keys of a segment that lie in an item's sections.
struct KeySpan {
  int32_t begin, end;
};
inline KeySpan keys_within(const ost_attention &a, const ost_item &item, const ost_segment &s) {
  const auto key_at = [&](int32_t section) {
    const int64_t key = int64_t{section} * a.section_keys - s.first_position;
    return static_cast<int32_t>(key < 0 ? 0 : key < s.num_keys ? key : s.num_keys);
  };
  return {key_at(item.first_section), key_at(item.last_section)};
}

// Where the chunk ends that begins at a key of a segment: sections end where chunks do.
inline int64_t end_of_chunk(const ost_attention &a, const ost_segment &s, int32_t key,
                            int32_t max_keys) {
  const int32_t left = a.section_keys - (s.first_position + key) % a.section_keys;
  return int64_t{key} + (left < max_keys ? left : max_keys);
}

constexpr int64_t kLeadBytes = 64 << 10;
constexpr int64_t kLineBytes = 64;

// A walk along the keys and values of a task, in the order in which its chunks are read.
class Prefetcher {
 public:
  Prefetcher(const ost_attention &attention, const Task &task)
      : a_(attention),
        group_bytes_{key_group_size(a_.kv) * bytes_of(a_.kv.dtype),
                     value_group_size(a_.kv) * bytes_of(a_.kv.dtype)} {
    follow(*task.item, task.kv_head);
    for (int64_t bytes = 0; task.is_prefetched && bytes < kLeadBytes && at_ != nullptr; take_group())
      bytes += end_ - at_;
    next_ = task.next_item;
    next_head_ = task.next_head;
    if (at_ == nullptr) take_group();
    if (!task.is_prefetched) prefetch(kLeadBytes / kLineBytes);
  }

  // Asks for the next so many lines, as far as there are any.
  void prefetch(int64_t lines) {
    while (lines > 0 && at_ != nullptr) {
      const int64_t left = (end_ - at_ + kLineBytes - 1) / kLineBytes;
      const char *at = at_, *const stop = at + (lines < left ? lines : left) * kLineBytes;
      for (; at < stop; at += kLineBytes) __builtin_prefetch(at, 0, 2);
      at_ = at;
      lines -= left;
      if (at >= end_) take_group();
    }
  }

 private:
  void follow(const ost_item &item, int32_t kv_head) {
    const int64_t rows = int64_t{item.last_row - item.first_row} * a_.num_heads / a_.kv.num_kv_heads;
    chunk_keys_ = chunk_groups(rows < kMaxRows ? rows : kMaxRows) * kGroup;
    kv_head_ = kv_head;
    item_ = &item;
    segment_ = item.first_segment - 1;
    next_segment();
    take_group();
  }

  void next_segment() {
    if (++segment_ >= item_->last_segment) return;
    keys_ = keys_within(a_, *item_, a_.segments[segment_]);
    first_key_ = key_ = keys_.begin;
    is_value_ = false;
  }

  // Goes to the next group of keys or of values; at_ is null behind the last one.
  __attribute__((noinline)) void take_group() {
    at_ = nullptr;
    while (segment_ < item_->last_segment) {
      const ost_segment &s = a_.segments[segment_];
      const int64_t end = end_of_chunk(a_, s, first_key_, chunk_keys_);
      if (key_ < (end < keys_.end ? end : keys_.end)) {
        point_at(s, key_);
        key_ += kGroup;
        return;
      }
      if (is_value_) first_key_ = key_;
      is_value_ = !is_value_;
      key_ = first_key_;
      if (!is_value_ && key_ >= keys_.end) next_segment();
    }
    if (next_ == nullptr) return;
    const ost_item &item = *next_;
    next_ = nullptr;
    is_next_ = true;
    follow(item, next_head_);
  }

  void point_at(const ost_segment &s, int32_t key) {
    const int64_t bytes = group_bytes_[is_value_], size = a_.kv.block_size;
    // Of the next task, as much as it will take to have been asked for.
    if (is_next_ && (next_bytes_ += bytes) > kLeadBytes) {
      segment_ = item_->last_segment;
      return;
    }
    const int64_t block = a_.blocks[s.first_entry + key / size];
    const auto *from = static_cast<const char *>(is_value_ ? a_.kv.values : a_.kv.keys);
    at_ = from + group_number(a_.kv, block, kv_head_, key % size) * bytes;
    end_ = at_ + bytes;
  }

  const ost_attention &a_;
  const int64_t group_bytes_[2];
  const ost_item *item_ = nullptr, *next_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
  KeySpan keys_{};
  int64_t next_bytes_ = 0;
  int32_t next_head_ = 0, kv_head_ = 0, segment_ = 0;
  int32_t chunk_keys_ = 0, first_key_ = 0, key_ = 0;  // of the segment, of the chunk, of the walk
  bool is_value_ = false, is_next_ = false;
};

}  // namespace
}  // namespace ost
