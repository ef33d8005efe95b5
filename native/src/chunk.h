// Addresses of a chunk's rows.
//
// Many rows go through a program in chunks, so that what one operation leaves is still in the
// processor's cache when the next needs it. What nobody needs but the next operations of the same
// chunk is in the arena, which every chunk overwrites; all else has room for all rows::
//
//     stream  [ chunk 0 | chunk 1 | chunk 2 ]        arena  [ chunk 0, then 1, then 2 ]
#pragma once

#include <cstdint>
#include <initializer_list>

#include "simd/formats.h"
#include "ostinato_program.h"

namespace ost {

class Chunk {
 public:
  Chunk(const ost_program &program, int64_t first_row, int64_t num_rows)
      : arena_begin_(static_cast<const char *>(program.arena)),
        arena_end_(arena_begin_ + program.arena_bytes), first_(first_row), num_rows_(num_rows) {}

  // Records of these rows alone.
  ost_add_norm of(ost_add_norm op) const {
    of_matrices(bytes_of(op.dtype), {&op.residual, &op.addend, &op.output, &op.gates});
    return with_rows(op);
  }
  ost_heads of(ost_heads op) const {
    of_matrices(bytes_of(op.dtype), {&op.projected, &op.queries, &op.keys, &op.values});
    of_matrices(sizeof(float), {&op.angles});
    return with_rows(op);
  }
  ost_gated of(ost_gated op) const {
    of_matrices(bytes_of(op.dtype), {&op.gate_up, &op.output});
    return with_rows(op);
  }
  ost_gated_norm of(ost_gated_norm op) const {
    of_matrices(bytes_of(op.dtype), {&op.gates, &op.output});
    of_matrices(bytes_of(op.input_dtype), {&op.inputs});
    return with_rows(op);
  }
  ost_product of(ost_product op) const {
    of_matrices(bytes_of(op.dtype), {&op.inputs, &op.outputs});
    return with_rows(op);
  }
  ost_lora of(ost_lora op) const {
    of_matrices(bytes_of(op.dtype), {&op.inputs, &op.outputs});
    op.first_row = first_;
    return with_rows(op);
  }
  ost_gated_product of(ost_gated_product op) const {
    return {of(op.product), of(op.gated)};
  }
  ost_write of(ost_write op) const {
    for (ost_rows *rows : {&op.keys, &op.values})
      rows->data = from_first(rows->data, rows->token_stride * bytes_of(rows->dtype));
    op.slots += first_;
    return with_rows(op);
  }
  ost_take of(ost_take op) const {
    op.output = from_first(op.output, op.output_stride);
    op.rows += first_;
    return with_rows(op);
  }

 private:
  template <class Record>
  Record with_rows(Record op) const {
    op.num_rows = static_cast<decltype(op.num_rows)>(num_rows_);
    return op;
  }
  void of_matrices(int64_t element_bytes, std::initializer_list<ost_matrix *> matrices) const {
    for (ost_matrix *matrix : matrices)
      matrix->data = from_first(matrix->data, matrix->stride * element_bytes);
  }
  void *from_first(void *data, int64_t row_bytes) const {
    char *bytes = static_cast<char *>(data);
    const bool in_arena = bytes >= arena_begin_ && bytes < arena_end_;
    return bytes == nullptr || in_arena ? bytes : bytes + first_ * row_bytes;
  }

  const char *arena_begin_, *arena_end_;
  int64_t first_, num_rows_;
};

}  // namespace ost
