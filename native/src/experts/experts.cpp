// A mixture's experts, each one's weights read once per step.
//
// Pairs of a row and one of its experts are sorted by expert. Experts go in chunks, so that what is
// between their products stays in the processor's caches; a chunk is five works, one after the other::
//
//     gather     rows of each expert side by side, where it has several
//     gate_up    units of all its experts, as products have them     (pairs, 2 * inner), or without ups, inner
//     gate                                                           (pairs, inner)
//     down       likewise                                            (pairs, width)
//     add        stripes of columns: weight * down to the sums of the pair's row, in the order of experts
//
// After gate_up and down, the updates of adapters are added to pairs of their rows: of an expert's pairs,
// those of one adapter are neighbours.
//
// So all threads compute on all experts, and no row's sum depends on rows beside it.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "experts/kernels.h"
#include "simd/formats.h"
#include "lora.h"
#include "weights/scale_tiles.h"
#include "threads/scratch.h"
#include "weights/tiles.h"
#include "threads/work.h"

namespace ost {

namespace {

constexpr int64_t kChunkPairs = 2048;
constexpr int64_t kStripe = 64;          // columns
constexpr int64_t kGatheredAtOnce = 16;  // rows
constexpr int64_t kLine = 64;            // bytes of a line of the cache

const ExpertsKernels &experts_kernels() {
#if defined(__x86_64__)
  const int32_t isa = ost_current_isa();
  if (isa >= OST_AVX512_BF16) return experts_avx512_bf16();
  if (isa >= OST_AVX512) return experts_avx512();
  if (isa >= OST_AVX2) return experts_avx2();
#elif defined(__aarch64__)
  if (ost_current_isa() >= OST_NEON) return experts_neon();
#endif
  return experts_generic();
}

// Pairs first .. first + count - 1 of the order are an expert's.
struct Group {
  int64_t expert, first, count;
};

void *moved(void *data, int64_t bytes) { return static_cast<char *>(data) + bytes; }

const void *moved(const void *data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<const char *>(data) + bytes;
}

int64_t inner_of(const ost_experts &op) { return op.gate_up.num_outputs / (1 + op.has_up); }

// One expert's part of a packed weight of all.
ost_product of_expert(ost_product p, int64_t expert) {
  const int64_t first_tile = expert * num_tiles(p.num_outputs);
  const bool is_plain = p.weight_format == OST_PLAIN;
  const int64_t bits = is_plain ? 8 * bytes_of(p.dtype) : bits_of_codes(p.weight_format);
  p.tiles = moved(p.tiles, first_tile * kTileOutputs * p.num_inputs * bits / 8);
  p.bias = moved(p.bias, expert * p.num_outputs * bytes_of(p.dtype));
  if (is_plain) return p;
  const int64_t groups = (p.num_inputs + p.group_size - 1) / p.group_size;
  const int64_t place = first_tile * groups * kTileOutputs;
  const int64_t bytes = bytes_of_scales(p.scale_dtype, groups, p.group_size) * first_tile;
  p.scales = moved(p.scales, bytes);
  p.minima = moved(p.minima, bytes);
  p.zeros = moved(p.zeros, place);
  if (p.order != nullptr) p.order += expert * p.used_inputs;
  return p;
}

// Products of several experts as one work: their units, one expert's after the other's.
struct Products {
  std::vector<ost_product> products;
  std::vector<Work> works;
  std::vector<int64_t> ends;

  Work work() {
    int64_t end = 0, per_piece = 1;
    for (const ost_product &product : products) {
      works.push_back(work_of(product));
      per_piece = std::max(per_piece, works.back().units_per_piece);
      ends.push_back(end += works.back().num_units);
    }
    return {this, compute, end, per_piece};
  }

  static void compute(const void *record, int64_t first, int64_t last) {
    const auto &own = *static_cast<const Products *>(record);
    auto i = static_cast<size_t>(std::upper_bound(own.ends.begin(), own.ends.end(), first) - own.ends.begin());
    for (; first < last; ++i) {
      const int64_t begin = i == 0 ? 0 : own.ends[i - 1], end = std::min(last, own.ends[i]);
      own.works[i].compute(own.works[i].record, first - begin, end - begin);
      first = end;
    }
  }
};

// Memory that all chunks use again.
struct Buffers {
  void *gathered, *gate_up, *gated, *down;
  float *sums;
};

// Pairs first .. first + count - 1 of a chunk are an expert's, of rows of one adapter.
struct AdaptedPairs {
  int64_t expert, first, count;
  const ost_lora_group *adapter;
};

struct Chunk {
  const ost_experts *op;
  const Buffers *buffers;
  const int64_t *order;  // of its pairs: row * top_k + place
  const Share *shares;
  int64_t num_pairs;
  bool begins, ends;
  Gating gating;
  Products gate_up, down;
  std::vector<LoraBlocks> updates;  // of gate_up and of down, or none

  int64_t row_of(int64_t pair) const { return order[pair] / op->top_k; }
  int64_t bytes() const { return bytes_of(op->gate_up.dtype); }
  int64_t row_bytes() const { return op->gate_up.num_inputs * bytes(); }
  const void *given(int64_t pair) const {
    return moved(op->inputs.data, row_of(pair) * op->inputs.stride * bytes());
  }
  int64_t down_stride() const { return round_up(op->down.num_outputs, kTileOutputs); }

  void add_expert(const Group &group, int64_t first) {
    const int64_t inner = gating.inner;
    ost_product p = of_expert(op->gate_up, group.expert);
    p.num_rows = static_cast<int32_t>(group.count);
    p.inputs = {moved(buffers->gathered, first * row_bytes()), op->gate_up.num_inputs};
    if (group.count == 1 && updates.empty()) p.inputs.data = const_cast<void *>(given(first));
    p.outputs = {moved(buffers->gate_up, first * p.num_outputs * bytes()), p.num_outputs};
    gate_up.products.push_back(p);
    p = of_expert(op->down, group.expert);
    p.num_rows = static_cast<int32_t>(group.count);
    p.inputs = {moved(buffers->gated, first * inner * bytes()), inner};
    p.outputs = {moved(buffers->down, first * down_stride() * bytes()), down_stride()};
    down.products.push_back(p);
  }

  // `places` are 0, 1 and so on: pairs of a chunk are rows of its buffers.
  void add_updates(const std::vector<AdaptedPairs> &adapted, const int64_t *places) {
    if (adapted.empty()) return;
    std::vector<ost_lora_group> groups;
    for (const AdaptedPairs &own : adapted)
      groups.push_back({places + own.first, own.count,
                        own.adapter->layers + op->adapter_layer + own.expert});
    const ost_lora_step step{groups.data(), static_cast<int64_t>(groups.size())};
    const int64_t inner = gating.inner, width = op->gate_up.num_inputs;
    ost_lora lora{{buffers->gathered, width}, {buffers->gate_up, op->gate_up.num_outputs}, &step, 0, 0, num_pairs,
                  static_cast<int32_t>(width), op->gate_up.dtype, op->num_threads};
    updates.emplace_back(lora);
    lora.inputs = {buffers->gated, inner};
    lora.outputs = {buffers->down, down_stride()};
    lora.layer = op->num_experts;
    lora.num_inputs = static_cast<int32_t>(inner);
    updates.emplace_back(lora);
  }

  void add_works(std::vector<Work> &works) {
    const bool is_gathered =
        !updates.empty() || static_cast<int64_t>(gate_up.products.size()) < num_pairs;
    const auto update = [&](size_t which) {
      if (updates.empty()) return;
      works.push_back(updates[which].down());
      works.push_back(updates[which].up());
    };
    if (is_gathered) works.push_back({this, gather, num_pairs, kGatheredAtOnce});
    works.push_back(gate_up.work());
    update(0);
    works.push_back({this, gate, num_pairs, 1});
    works.push_back(down.work());
    update(1);
    works.push_back({this, add, round_up(op->down.num_outputs, kStripe) / kStripe, 1});
  }

  static void gather(const void *record, int64_t first, int64_t last) {
    const auto &own = *static_cast<const Chunk *>(record);
    for (int64_t pair = first; pair < last; ++pair)
      std::memcpy(moved(own.buffers->gathered, pair * own.row_bytes()), own.given(pair),
                  static_cast<size_t>(own.row_bytes()));
  }

  static void gate(const void *record, int64_t first, int64_t last) {
    experts_kernels().gate(static_cast<const Chunk *>(record)->gating, first, last);
  }

  static void add(const void *record, int64_t first, int64_t last) {
    const auto &own = *static_cast<const Chunk *>(record);
    const ost_experts &op = *own.op;
    const ExpertsKernels &kernels = experts_kernels();
    const int64_t width = op.down.num_outputs, begin = first * kStripe;
    const int64_t end = std::min(last * kStripe, width);
    float *sums = own.buffers->sums;
    if (own.begins)
      for (int64_t row = 0; row < op.num_rows; ++row)
        std::fill(sums + row * width + begin, sums + row * width + end, 0.f);
    kernels.add_shares(own.shares, own.num_pairs, own.buffers->down, own.down_stride(),
                       op.down.dtype, sums, width, begin, end);
    if (!own.ends) return;
    for (int64_t row = 0; row < op.num_rows; ++row)
      kernels.round_sums(sums + row * width + begin,
                         moved(op.outputs.data, (row * op.outputs.stride + begin) * own.bytes()),
                         op.down.dtype, end - begin);
  }
};

class Mixture {
 public:
  explicit Mixture(const ost_experts &op) : op_(op) {
    sort();
    std::vector<int64_t> begins;  // groups that chunks begin with
    int64_t pairs = kChunkPairs, largest = 0;
    for (size_t i = 0; i < groups_.size(); ++i) {
      if (pairs + groups_[i].count > kChunkPairs) begins.push_back(static_cast<int64_t>(i)), pairs = 0;
      pairs += groups_[i].count;
      largest = std::max(largest, pairs);
    }
    begins.push_back(static_cast<int64_t>(groups_.size()));
    reserve(largest);
    chunks_.resize(begins.size() - 1);
    for (size_t i = 0; i < chunks_.size(); ++i) {
      begin_chunk(chunks_[i], begins[i], begins[i + 1]);
      chunks_[i].begins = i == 0;
      chunks_[i].ends = i + 1 == chunks_.size();
    }
    share_sums();
  }

  void run() {
    std::vector<Work> works;
    for (Chunk &chunk : chunks_) chunk.add_works(works);
    run_works(works.data(), static_cast<int64_t>(works.size()), op_.num_threads);
  }

 private:
  // Pairs by expert, and of an expert by row.
  void sort() {
    const int64_t num_pairs = int64_t{op_.num_rows} * op_.top_k;
    std::vector<int64_t> places(static_cast<size_t>(op_.num_experts) + 1);
    for (int64_t pair = 0; pair < num_pairs; ++pair) ++places[op_.experts[pair] + 1];
    for (int64_t expert = 0; expert < op_.num_experts; ++expert) {
      if (places[expert + 1] > 0) groups_.push_back({expert, places[expert], places[expert + 1]});
      places[expert + 1] += places[expert];
    }
    order_.resize(static_cast<size_t>(num_pairs));
    for (int64_t pair = 0; pair < num_pairs; ++pair) order_[places[op_.experts[pair]]++] = pair;
    if (op_.adapters != nullptr) sort_by_adapter();
    shares_.reserve(order_.size());
    for (const int64_t pair : order_) shares_.push_back({pair / op_.top_k, op_.weights[pair]});
  }

  void sort_by_adapter() {
    adapter_of_.resize(static_cast<size_t>(op_.num_rows));
    for (int64_t i = 0; i < op_.adapters->num_groups; ++i) {
      const ost_lora_group &group = op_.adapters->groups[i];
      for (int64_t row = 0; row < group.num_rows; ++row) adapter_of_[group.rows[row]] = &group;
    }
    const std::less<const ost_lora_group *> before;
    for (const Group &group : groups_)
      std::stable_sort(order_.begin() + group.first, order_.begin() + group.first + group.count,
                       [&](int64_t a, int64_t b) { return before(adapter_of(a), adapter_of(b)); });
    places_.resize(order_.size());
    std::iota(places_.begin(), places_.end(), 0);
  }

  const ost_lora_group *adapter_of(int64_t pair) const { return adapter_of_[pair / op_.top_k]; }

  // Updates of one product are read before the next one's are written: they share the memory.
  void share_sums() {
    int64_t max_bytes = 0;
    for (const Chunk &chunk : chunks_)
      for (const LoraBlocks &each : chunk.updates) max_bytes = std::max(max_bytes, each.sums_bytes());
    if (max_bytes == 0) return;
    void *const sums = sums_scratch(max_bytes);
    for (Chunk &chunk : chunks_)
      for (LoraBlocks &each : chunk.updates) each.keep_sums_in(sums);
  }

  // Pairs of a chunk whose rows have an adapter that changes their expert.
  std::vector<AdaptedPairs> adapted(int64_t first_group, int64_t last_group) const {
    std::vector<AdaptedPairs> adapted;
    if (op_.adapters == nullptr) return adapted;
    const int64_t start = groups_[first_group].first;
    for (int64_t i = first_group; i < last_group; ++i) {
      const Group &own = groups_[i];
      for (int64_t pair = own.first, end; pair < own.first + own.count; pair = end) {
        const ost_lora_group *const adapter = adapter_of(order_[pair]);
        for (end = pair; end < own.first + own.count && adapter_of(order_[end]) == adapter;) ++end;
        if (adapter == nullptr) continue;
        const ost_lora_layer *const layers = adapter->layers + op_.adapter_layer + own.expert;
        if (layers[0].num_parts + layers[op_.num_experts].num_parts > 0)
          adapted.push_back({own.expert, pair - start, end - pair, adapter});
      }
    }
    return adapted;
  }

  void reserve(int64_t pairs) {
    const int64_t size = bytes_of(op_.gate_up.dtype), inner = inner_of(op_);
    const int64_t sizes[] = {pairs * op_.gate_up.num_inputs * size, pairs * op_.gate_up.num_outputs * size,
                             pairs * inner * size, pairs * round_up(op_.down.num_outputs, kTileOutputs) * size,
                             int64_t{op_.num_rows} * op_.down.num_outputs * 4};
    int64_t total = 0, at = 0;
    for (const int64_t each : sizes) total += round_up(each, kLine);
    void *memory = experts_scratch(total), *parts[5];
    for (int i = 0; i < 5; ++i) parts[i] = moved(memory, at), at += round_up(sizes[i], kLine);
    buffers_ = {parts[0], parts[1], parts[2], parts[3], static_cast<float *>(parts[4])};
  }

  void begin_chunk(Chunk &chunk, int64_t first_group, int64_t last_group) {
    const int64_t first = groups_[first_group].first;
    chunk.op = &op_;
    chunk.buffers = &buffers_;
    chunk.order = order_.data() + first;
    chunk.shares = shares_.data() + first;
    chunk.num_pairs = groups_[last_group - 1].first + groups_[last_group - 1].count - first;
    chunk.gating = {buffers_.gate_up, buffers_.gated, inner_of(op_), op_.gate_up.dtype, op_.activation,
                    op_.has_up,       op_.alpha,      op_.limit};
    chunk.add_updates(adapted(first_group, last_group), places_.data());
    for (int64_t i = first_group; i < last_group; ++i)
      chunk.add_expert(groups_[i], groups_[i].first - first);
  }

  const ost_experts &op_;
  Buffers buffers_{};
  std::vector<Group> groups_;
  std::vector<int64_t> order_;
  std::vector<Share> shares_;
  std::vector<const ost_lora_group *> adapter_of_;  // of rows; null for none
  std::vector<int64_t> places_;
  std::vector<Chunk> chunks_;
};

}  // namespace

}  // namespace ost

extern "C" void ost_run_experts(const ost_experts *op) {
  if (op->num_rows > 0) ost::Mixture(*op).run();
}
