/* Runs a whole step of a model by one call.
 *
 * A program is the operations of all layers in order, laid down once: each names a record that says
 * where its numbers lie. From step to step only numbers of rows change, what the records of
 * attention point to, and where rows are taken from. As in ostinato_native.h, whoever calls has checked every bound
 * (src/ostinato/runner/forward/program.py).
 */
#ifndef OSTINATO_PROGRAM_H
#define OSTINATO_PROGRAM_H

#include "ostinato_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What an operation does, and of which type its record is. */
enum ost_operation_kind {
  OST_ADD_NORM = 0, /* ost_add_norm */
  OST_HEADS = 1,    /* ost_heads */
  OST_GATED = 2,    /* ost_gated */
  OST_PRODUCT = 3,  /* ost_product */
  OST_WRITE = 4,    /* ost_write */
  OST_ATTEND = 5,   /* ost_layer_attention */
  OST_COPY = 6,     /* ost_layer_copy */
  OST_TAKE = 7,     /* ost_take */
  OST_GATED_PRODUCT = 8, /* ost_gated_product */
  OST_LORA = 9,          /* ost_lora */
  OST_MIXER = 10,        /* ost_mixer */
  OST_GATED_NORM = 11    /* ost_gated_norm */
};

/* On which rows an operation is run. */
enum ost_operation_rows {
  OST_ALL_ROWS = 0,   /* of the step */
  OST_LOGIT_ROWS = 1  /* those whose logits are computed */
};

typedef struct ost_operation {
  void *record; /* what it says of a number of rows is of no account */
  int32_t kind;
  int32_t rows;
} ost_operation;

/* Row i of output is row rows[i] of a table. Strides and widths are in bytes. */
typedef struct ost_take {
  const void *table;
  int64_t table_stride;
  void *output;
  int64_t output_stride;
  const int64_t *rows; /* (num_rows,), each of them in the table */
  int64_t num_rows;
  int64_t width;
} ost_take;

/* Store keys and values of the step's tokens, as ost_kv_write does. */
typedef struct ost_write {
  ost_kv kv;
  ost_rows keys;
  ost_rows values;
  const int64_t *slots; /* (num_rows,), all different */
  int64_t num_rows;
} ost_write;

/* Slots that a step copies in every layer: all are read before any is written. */
typedef struct ost_copies {
  const int64_t *sources; /* (num_slots,) */
  const int64_t *targets; /* (num_slots,), all different, none of them a source */
  int64_t num_slots;
} ost_copies;

/* Copy them within one layer, as ost_kv_copy does. */
typedef struct ost_layer_copy {
  ost_kv kv;
  const ost_copies *step;
} ost_layer_copy;

/* One layer's attention: what it shares with other layers of its kind is looked up in each step. */
typedef struct ost_layer_attention {
  ost_attention layer;       /* kv, queries, output, sinks, scale and soft cap are the layer's own */
  const ost_attention *step; /* all the rest is this one's */
} ost_layer_attention;

/* Operations in order, and what they work on.
 *
 * Rows go from one attention to the next in chunks, so that what one operation leaves is still in the
 * processor's cache when the next needs it. A matrix in the arena holds a chunk's rows, which the next
 * chunk overwrites; any other holds all rows of the step. Attention, mixers and copies see them all at once,
 * and chunks begin anew where the logit rows do: nothing in the arena is read beyond.
 */
typedef struct ost_program {
  const ost_operation *operations;
  int64_t num_operations;
  int64_t rows_per_chunk; /* at most; a multiple of 32 */
  const void *arena;
  int64_t arena_bytes;
} ost_program;

/* Run operations one after the other, each on all threads: on num_rows rows, or num_logit_rows of
 * them; on none, an operation is left out. */
OST_EXPORT void ost_run_program(const ost_program *program, int64_t num_rows, int64_t num_logit_rows,
                                int32_t num_threads);

#ifdef __cplusplus
}
#endif
#endif
