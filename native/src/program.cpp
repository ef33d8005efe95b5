// How do the operations of a program become works that threads share out?
#include "ostinato_program.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "work.h"

namespace ost {

namespace {

using Works = std::vector<Work>;

template <class Record>
void add_rows(Works &works, void *record, int64_t num_rows) {
  Record &op = *static_cast<Record *>(record);
  op.num_rows = static_cast<decltype(op.num_rows)>(num_rows);
  works.push_back(work_of(op));
}

// A unit is a head.
void add_write(Works &works, void *record, int64_t num_rows) {
  ost_write &write = *static_cast<ost_write *>(record);
  write.num_rows = num_rows;
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    const ost_write &w = *static_cast<const ost_write *>(of);
    for (int64_t head = first; head < last; ++head)
      kernels().write(w.kv, w.keys, w.values, w.slots, 0, w.num_rows, static_cast<int32_t>(head));
  };
  works.push_back({record, compute, write.kv.num_kv_heads, 1});
}

// A unit is a row.
void add_take(Works &works, void *record, int64_t num_rows) {
  ost_take &take = *static_cast<ost_take *>(record);
  take.num_rows = num_rows;
  const auto compute = [](const void *of, int64_t first, int64_t last) {
    const ost_take &t = *static_cast<const ost_take *>(of);
    for (int64_t row = first; row < last; ++row)
      std::memcpy(static_cast<char *>(t.output) + row * t.output_stride,
                  static_cast<const char *>(t.table) + t.rows[row] * t.table_stride,
                  static_cast<size_t>(t.width));
  };
  works.push_back({record, compute, num_rows, 4});
}

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

void add(Works &works, const ost_operation &operation, int64_t num_rows) {
  switch (operation.kind) {
    case OST_ADD_NORM:
      return add_rows<ost_add_norm>(works, operation.record, num_rows);
    case OST_HEADS:
      return add_rows<ost_heads>(works, operation.record, num_rows);
    case OST_GATED:
      return add_rows<ost_gated>(works, operation.record, num_rows);
    case OST_PRODUCT:
      return add_rows<ost_product>(works, operation.record, num_rows);
    case OST_WRITE:
      return add_write(works, operation.record, num_rows);
    case OST_ATTEND:
      return add_attention(works, operation.record);
    case OST_COPY:
      return add_copy(works, operation.record);
    case OST_TAKE:
      return add_take(works, operation.record, num_rows);
  }
}

}  // namespace

}  // namespace ost

extern "C" void ost_run_program(const ost_operation *operations, int64_t num_operations,
                                int64_t num_rows, int64_t num_wanted, int32_t num_threads) {
  ost::Works works;
  works.reserve(static_cast<size_t>(2 * num_operations));
  for (int64_t i = 0; i < num_operations; ++i) {
    const int64_t rows = operations[i].rows == OST_WANTED_ROWS ? num_wanted : num_rows;
    if (rows > 0) ost::add(works, operations[i], rows);
  }
  ost::run_works(works.data(), static_cast<int64_t>(works.size()), num_threads);
}
