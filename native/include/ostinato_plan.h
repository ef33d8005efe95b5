/* Plans how a step reads keys and values: turns its block tables into the arguments of ost_attend.
 *
 * Sequences whose tables begin alike are laid side by side; each run that several of them share, and
 * that is worth a reading of its own, becomes one segment for all of them; rows are cut into items,
 * and items that would keep one thread busy while others wait are cut by keys.
 *
 * Whoever calls has seen to the lengths of arrays (src/ostinato/runner/attention/native_backend.py); what
 * is in them is looked at here, in one pass, before anything goes by it. What goes out points at nothing
 * that is not there.
 */
#ifndef OSTINATO_PLAN_H
#define OSTINATO_PLAN_H

#include "ostinato_native.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The sequences of a step; each brings at least one row, and its table covers its last one. */
typedef struct ost_step {
  const int64_t *starts;          /* (num_sequences + 1,): first row of each, and the end */
  const int64_t *first_positions; /* (num_sequences,): of each one's first row */
  const int64_t *blocks;          /* tables end to end */
  const int64_t *table_starts;    /* (num_sequences + 1,) */
  int64_t num_entries;            /* in blocks */
  int32_t num_sequences;
  int32_t block_size;
  int32_t num_blocks; /* of the store; the last stands in tables where one has left the window */
} ost_step;

/* What may be wrong with a step. */
enum ost_step_fault {
  OST_WRONG_ROWS = -1,      /* they do not begin at 0, or a sequence has none */
  OST_WRONG_POSITIONS = -2, /* negative, or past what fits 32 bits */
  OST_WRONG_TABLES = -3,    /* they are not within blocks, or do not cover what a sequence sees */
  OST_WRONG_BLOCKS = -4     /* no block of the store */
};

/* How layers of one kind are read, and how the library's time is spent; costs are in readings of one
 * key of one head, and rows count each head of queries. */
typedef struct ost_rules {
  double keys_per_run;  /* a run is worth it if it saves more readings than this ... */
  double keys_per_row;  /* ... and this for each of its rows; infinite shares nothing */
  double row_cost;      /* of looking at a key */
  double min_part;      /* below which nothing is cut by keys */
  double max_packed_cost; /* up to which neighbouring items become one */
  int32_t item_rows;    /* whose state stays in a core's cache */
  int32_t run_keys;     /* runs end at multiples of this; 16, or what kernels sum up at once */
  int32_t section_keys; /* items are cut at multiples of this, see ost_item; a multiple of 32 */
  int32_t tasks_per_thread;
  int32_t window;       /* positions that a row sees, its own included; 0 sees all before it */
  int32_t group;        /* heads of queries per head of keys */
  int32_t num_kv_heads;
  int32_t num_threads;
} ost_rules;

/* What ost_attention needs of a step; field by field as there. */
typedef struct ost_plan {
  const int32_t *tokens;
  const int32_t *positions;
  const int32_t *blocks;
  const ost_segment *segments;
  const ost_item *items;
  const int32_t *merge_rows;
  const int32_t *merge_starts;
  const int32_t *merge_partials;
  int32_t num_rows;
  int32_t num_blocks;
  int32_t num_segments;
  int32_t num_items;
  int32_t num_merges;
  int32_t num_partials;
} ost_plan;

/* Plan a step into num_bytes bytes at arena, aligned to 8; plan points into it.
 *
 * Returns how many bytes that takes. If there are fewer, nothing is written and plan is as it was:
 * call again with as many. Returns what is wrong if something is. */
OST_EXPORT int64_t ost_make_plan(const ost_step *step, const ost_rules *rules, void *arena,
                                 int64_t num_bytes, ost_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
