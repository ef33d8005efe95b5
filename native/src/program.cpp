// Turns the operations of a program into works that threads share out.
#include "ostinato_program.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <tuple>
#include <vector>

#include "chunk.h"
#include "attention/kernels.h"
#include "lora.h"
#include "threads/scratch.h"
#include "threads/work.h"

namespace ost {

namespace {

using Works = std::vector<Work>;

using ost::work_of;

// A unit is a head.
Work work_of(const ost_write &write) {
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    const ost_write &w = *static_cast<const ost_write *>(of);
    for (int64_t head = first; head < last; ++head)
      kernels().write(w.kv, w.keys, w.values, w.slots, 0, w.num_rows, static_cast<int32_t>(head));
  };
  return {&write, compute, write.kv.num_kv_heads, 1};
}

// A unit is a row.
Work work_of(const ost_take &take) {
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    const ost_take &t = *static_cast<const ost_take *>(of);
    for (int64_t row = first; row < last; ++row)
      std::memcpy(static_cast<char *>(t.output) + row * t.output_stride,
                  static_cast<const char *>(t.table) + t.rows[row] * t.table_stride,
                  static_cast<size_t>(t.width));
  };
  return {&take, compute, take.num_rows, 4};
}

// Records of the chunks of one run; they stay where they are.
template <class Record>
using Kept = std::deque<Record>;
using Records = std::tuple<Kept<ost_add_norm>, Kept<ost_heads>, Kept<ost_gated>, Kept<ost_product>,
                           Kept<ost_write>, Kept<ost_take>, Kept<ost_gated_product>,
                           Kept<ost_gated_norm>, Kept<LoraBlocks>>;

struct Run {
  Works works;
  Records records;

  template <class Record>
  void add(const Chunk &chunk, const void *record) {
    works.push_back(work_of(keep<Record>(chunk, record)));
  }

  void add_gated_product(const Chunk &chunk, const void *record) {
    const auto &op = keep<ost_gated_product>(chunk, record);
    if (gates_at_once(op)) return works.push_back(work_of(op));
    works.push_back(work_of(op.product));
    works.push_back(work_of(op.gated));
  }

  void add_lora(const Chunk &chunk, const void *record) {
    auto &kept = std::get<Kept<LoraBlocks>>(records);
    const LoraBlocks &blocks = kept.emplace_back(chunk.of(*static_cast<const ost_lora *>(record)));
    works.push_back(blocks.down());
    works.push_back(blocks.up());
  }

  // What one operation's updates leave is read before the next one's: they share the memory.
  void share_sums() {
    auto &kept = std::get<Kept<LoraBlocks>>(records);
    int64_t max_bytes = 0;
    for (const LoraBlocks &blocks : kept) max_bytes = std::max(max_bytes, blocks.sums_bytes());
    void *const sums = sums_scratch(max_bytes);
    for (LoraBlocks &blocks : kept) blocks.keep_sums_in(sums);
  }

 private:
  template <class Record>
  const Record &keep(const Chunk &chunk, const void *record) {
    auto &kept = std::get<Kept<Record>>(records);
    kept.push_back(chunk.of(*static_cast<const Record *>(record)));
    return kept.back();
  }
};

// A unit is all of it: few steps copy, and those that do copy a few slots.
void add_copy(Works &works, void *record) {
  const auto copy = [](const void *of, int64_t, int64_t) {
    const ost_layer_copy &c = *static_cast<const ost_layer_copy *>(of);
    ost_kv_copy(&c.kv, c.step->sources, c.step->targets, c.step->num_slots);
  };
  if (static_cast<const ost_layer_copy *>(record)->step->num_slots > 0)
    works.push_back({record, copy, 1, 1});
}

// This step's plan, for this layer.
void take_over(ost_layer_attention &attention) {
  ost_attention &layer = attention.layer;
  const ost_attention own = layer;
  layer = *attention.step;
  layer.kv = own.kv;
  layer.queries = own.queries;
  layer.output = own.output;
  layer.sinks = own.sinks;
  layer.scale = own.scale;
  layer.soft_cap = own.soft_cap;
}

// A unit is an item and one head of keys; then one is a row that was cut into partials.
void add_attention(Works &works, void *record) {
  auto &attention = *static_cast<ost_layer_attention *>(record);
  take_over(attention);
  const ost_attention &layer = attention.layer;
  const auto attend = [](const void *of, int64_t first, int64_t last) {
    const auto &a = *static_cast<const ost_attention *>(of);
    // Tasks are handed out one by one: the next of this thread is most likely so many further on.
    const int64_t num_tasks = int64_t{a.num_items} * a.kv.num_kv_heads;
    for (int64_t task = first; task < last; ++task) {
      const int64_t next = task + a.num_threads;
      kernels().attend(
          a, task_of(a, task, next < num_tasks ? next : -1, task >= a.num_threads));
    }
  };
  const auto merge = [](const void *of, int64_t first, int64_t last) {
    const auto &a = *static_cast<const ost_attention *>(of);
    for (int64_t task = first; task < last; ++task)
      kernels().merge(a, static_cast<int32_t>(task / a.num_heads),
                      static_cast<int32_t>(task % a.num_heads));
  };
  works.push_back({&layer, attend, int64_t{layer.num_items} * layer.kv.num_kv_heads, 1, true});
  if (layer.num_merges > 0)
    works.push_back({&layer, merge, int64_t{layer.num_merges} * layer.num_heads, 4});
}

void add_mixer(Works &works, const ost_mixer &mixer) {
  works.push_back(convolution_of(mixer));
  works.push_back(scan_of(mixer));
}

void add(Run &run, const ost_operation &operation, const Chunk &chunk) {
  switch (operation.kind) {
    case OST_ADD_NORM:
      return run.add<ost_add_norm>(chunk, operation.record);
    case OST_HEADS:
      return run.add<ost_heads>(chunk, operation.record);
    case OST_GATED:
      return run.add<ost_gated>(chunk, operation.record);
    case OST_PRODUCT:
      return run.add<ost_product>(chunk, operation.record);
    case OST_GATED_PRODUCT:
      return run.add_gated_product(chunk, operation.record);
    case OST_LORA:
      return run.add_lora(chunk, operation.record);
    case OST_WRITE:
      return run.add<ost_write>(chunk, operation.record);
    case OST_TAKE:
      return run.add<ost_take>(chunk, operation.record);
    case OST_ATTEND:
      return add_attention(run.works, operation.record);
    case OST_COPY:
      return add_copy(run.works, operation.record);
    case OST_MIXER:
      return add_mixer(run.works, *static_cast<const ost_mixer *>(operation.record));
    case OST_GATED_NORM:
      return run.add<ost_gated_norm>(chunk, operation.record);
  }
}

bool sees_all_rows(const ost_operation &operation) {
  return operation.kind == OST_ATTEND || operation.kind == OST_COPY || operation.kind == OST_MIXER;
}

// Where operations end that a chunk goes through before the next chunk does.
const ost_operation *end_of_stretch(const ost_operation *first, const ost_operation *end) {
  const ost_operation *last = first + 1;
  while (!sees_all_rows(*first) && last < end && !sees_all_rows(*last) && last->rows == first->rows)
    ++last;
  return last;
}

// Chunks are of one size but for the last: a product reads its whole weight for a few rows, too.
int64_t chunk_size(int64_t num_rows, int64_t max_rows) {
  const int64_t num_chunks = (num_rows + max_rows - 1) / max_rows;
  return (num_rows + 32 * num_chunks - 1) / (32 * num_chunks) * 32;
}

void add_stretch(Run &run, const ost_program &program, const ost_operation *first,
                 const ost_operation *last, int64_t num_rows) {
  if (num_rows == 0) return;
  const int64_t size =
      sees_all_rows(*first) ? num_rows : chunk_size(num_rows, program.rows_per_chunk);
  for (int64_t row = 0; row < num_rows; row += size) {
    const Chunk chunk(program, row, row + size < num_rows ? size : num_rows - row);
    for (const ost_operation *operation = first; operation < last; ++operation)
      add(run, *operation, chunk);
  }
}

}  // namespace

}  // namespace ost

extern "C" void ost_run_program(const ost_program *program, int64_t num_rows, int64_t num_logit_rows,
                                int32_t num_threads) {
  ost::Run run;
  const ost_operation *const end = program->operations + program->num_operations;
  for (const ost_operation *first = program->operations, *last; first < end; first = last) {
    last = ost::end_of_stretch(first, end);
    ost::add_stretch(run, *program, first, last,
                     first->rows == OST_LOGIT_ROWS ? num_logit_rows : num_rows);
  }
  run.share_sums();
  ost::run_works(run.works.data(), static_cast<int64_t>(run.works.size()), num_threads);
}
