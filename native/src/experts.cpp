// A mixture's experts, each one's weights read once per step.
//
// Pairs of a row and one of its experts are sorted by expert. Experts go in chunks, so that what is
// between their products stays in the processor's caches; a chunk is five works, one after the other::
//
//     gather     rows of each expert side by side, where it has several
//     gate_up    units of all its experts, as products have them     (pairs, 2 * inner)
//     gate                                                           (pairs, inner)
//     down       likewise                                            (pairs, width)
//     add        stripes of columns: weight * down to the sums of the pair's row, in the order of experts
//
// So all threads compute on all experts, and no row's sum depends on rows beside it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "experts_kernels.h"
#include "formats.h"
#include "scale_tiles.h"
#include "scratch.h"
#include "weight_tiles.h"
#include "work.h"

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

struct Chunk {
  const ost_experts *op;
  const Buffers *buffers;
  const int64_t *order;  // of its pairs: row * top_k + place
  const Share *shares;
  int64_t num_pairs;
  bool begins, ends;
  Gating gating;
  Products gate_up, down;

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
    if (group.count == 1) p.inputs.data = const_cast<void *>(given(first));
    p.outputs = {moved(buffers->gate_up, first * 2 * inner * bytes()), 2 * inner};
    gate_up.products.push_back(p);
    p = of_expert(op->down, group.expert);
    p.num_rows = static_cast<int32_t>(group.count);
    p.inputs = {moved(buffers->gated, first * inner * bytes()), inner};
    p.outputs = {moved(buffers->down, first * down_stride() * bytes()), down_stride()};
    down.products.push_back(p);
  }

  void add_works(std::vector<Work> &works) {
    const bool is_gathered = static_cast<int64_t>(gate_up.products.size()) < num_pairs;
    if (is_gathered) works.push_back({this, gather, num_pairs, kGatheredAtOnce});
    works.push_back(gate_up.work());
    works.push_back({this, gate, num_pairs, 1});
    works.push_back(down.work());
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
    shares_.resize(static_cast<size_t>(num_pairs));
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      const int64_t place = places[op_.experts[pair]]++;
      order_[place] = pair;
      shares_[place] = {pair / op_.top_k, op_.weights[pair]};
    }
  }

  void reserve(int64_t pairs) {
    const int64_t size = bytes_of(op_.gate_up.dtype), inner = op_.gate_up.num_outputs / 2;
    const int64_t sizes[] = {pairs * op_.gate_up.num_inputs * size, pairs * 2 * inner * size,
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
    chunk.gating = {buffers_.gate_up, buffers_.gated,   op_.gate_up.num_outputs / 2, op_.gate_up.dtype,
                    op_.activation,   op_.alpha, op_.limit};
    for (int64_t i = first_group; i < last_group; ++i)
      chunk.add_expert(groups_[i], groups_[i].first - first);
  }

  const ost_experts &op_;
  Buffers buffers_{};
  std::vector<Group> groups_;
  std::vector<int64_t> order_;
  std::vector<Share> shares_;
  std::vector<Chunk> chunks_;
};

}  // namespace

}  // namespace ost

extern "C" void ost_run_experts(const ost_experts *op) {
  if (op->num_rows > 0) ost::Mixture(*op).run();
}
