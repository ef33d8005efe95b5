/* The native library.
 *
 * A plain C ABI on raw pointers: no torch, no Python, so one build serves every version of both.
 * Nothing here checks a bound: whoever calls has checked shapes, strides, block ids and slots
 * before (src/ostinato/runner/native/). Sizes are in elements unless a name says bytes.
 *
 * Keys and values of one layer lie as the kernels read them, see kv/layout.h.
 */
#ifndef OSTINATO_NATIVE_H
#define OSTINATO_NATIVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OST_ABI_VERSION 22
#define OST_EXPORT __attribute__((visibility("default")))

/* Formats of keys, values, queries and outputs. Keys and values alone may be codes of 8 bits: the element
 * is code * scale, with one float scale for each token and head. */
enum ost_dtype { OST_FLOAT32 = 0, OST_BFLOAT16 = 1, OST_FLOAT16 = 2, OST_KV_INT8 = 3 };

/* Instruction sets, each one containing those before it of its architecture. */
enum ost_isa { OST_GENERIC = 0, OST_AVX2 = 1, OST_AVX512 = 2, OST_AVX512_BF16 = 3, OST_AMX = 4 };
enum ost_arm_isa { OST_NEON = 1, OST_NEON_DOTPROD = 2, OST_NEON_I8MM = 3, OST_NEON_BF16 = 4 };

/* Which version of this header the library was built from. */
OST_EXPORT int32_t ost_abi_version(void);

/* The best instruction set that this processor and its kernel (the operating system's) allow. */
OST_EXPORT int32_t ost_best_isa(void);

/* The instruction set in use: the best one until ost_use_isa says otherwise. */
OST_EXPORT int32_t ost_current_isa(void);

/* The instruction set whose kernels attention uses. It is the one in use, but for one case: where the
 * processor's best is AVX512_BF16, nobody has asked for that by ost_use_isa, and the processor is an
 * Intel, it is AVX512. */
OST_EXPORT int32_t ost_attention_isa(void);

/* Which one that is for a best instruction set and the processor's vendor, as CPUID spells it. */
OST_EXPORT int32_t ost_attention_isa_of(int32_t best, const char *vendor);

/* Use an instruction set from now on; returns it, or -1 where the processor lacks it. */
OST_EXPORT int32_t ost_use_isa(int32_t isa);

/* Keys and values of one layer.
 *
 * block_size is a multiple of 16 and key_dim is even. Slot = block * block_size + offset.
 */
typedef struct ost_kv {
  void *keys;
  void *values;
  int64_t num_blocks;
  int32_t dtype;
  int32_t num_kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t block_size;
} ost_kv;

/* Rows of tokens: element (token, head, d) is at token * token_stride + head * head_stride + d. */
typedef struct ost_rows {
  void *data;
  int64_t token_stride;
  int64_t head_stride;
  int32_t dtype;
} ost_rows;

/* Store the keys and values of num_tokens tokens into slots (all different), rounding to kv's dtype. */
OST_EXPORT void ost_kv_write(const ost_kv *kv, const ost_rows *keys, const ost_rows *values,
                             const int64_t *slots, int64_t num_tokens, int32_t num_threads);

/* Copy slots; every source is read before any target is written. */
OST_EXPORT void ost_kv_copy(const ost_kv *kv, const int64_t *sources, const int64_t *targets,
                            int64_t num_slots);

/* Fetch slots into contiguous rows, (num_slots, num_kv_heads, dim) each, in kv's dtype. A row of codes
 * has dim + 4 bytes: the codes, then their scale. */
OST_EXPORT void ost_kv_read(const ost_kv *kv, const int64_t *slots, int64_t num_slots, void *keys,
                            void *values);

/* Zero slots; what is zero already is read and not written, so that unused pages stay free. */
OST_EXPORT void ost_kv_zero(const ost_kv *kv, const int64_t *slots, int64_t num_slots);

/* A run of keys that neighbouring rows of the plan see.
 *
 * Rows first_row..last_row - 1 see keys at positions first_position..first_position + num_keys - 1,
 * each row up to its own position and within its window. Their blocks are
 * blocks[first_entry..]; the first key is the first of its block.
 */
typedef struct ost_segment {
  int64_t first_entry;
  int32_t first_row;
  int32_t last_row;
  int32_t first_position;
  int32_t num_keys;
} ost_segment;

/* What one task computes for one head of keys: some neighbouring rows over some neighbouring segments,
 * of which keys in sections first_section..last_section - 1 count.
 *
 * A section is section_keys positions of a sequence, counted from its first token. Whatever a row sees
 * of one is summed up by itself, and sections are added in order: so neither parts nor threads change
 * a bit.
 *
 * first_partial < 0: the rows' outputs. Else row r's sum over section s goes to partial
 * first_partial + (s - first_section) * (last_row - first_row) + r - first_row, to be merged; where
 * the row sees nothing of s, that partial is left as it is.
 */
typedef struct ost_item {
  int32_t first_row;
  int32_t last_row;
  int32_t first_segment;
  int32_t last_segment;
  int32_t first_section;
  int32_t last_section;
  int32_t first_partial;
} ost_item;

/* One layer's attention of one step.
 *
 * The plan's rows are the step's tokens in an order in which rows that share a run are
 * neighbours; every row is in one item that has no partials, or in one merge.
 */
typedef struct ost_attention {
  ost_kv kv;
  ost_rows queries;        /* (tokens, num_heads, key_dim) */
  ost_rows output;         /* (tokens, num_heads, value_dim) */
  const int32_t *tokens;   /* (num_rows,): which token a row is */
  const int32_t *positions; /* (num_rows,) */
  const int32_t *blocks;   /* block ids, run after run */
  const ost_segment *segments;
  const ost_item *items;   /* dearest first */
  const int32_t *merge_rows;     /* (num_merges,): rows that were cut into partials */
  const int32_t *merge_starts;   /* (num_merges + 1,): where each one's partials begin in ... */
  const int32_t *merge_partials; /* ... (merge_starts[num_merges],), by section */
  float *partials;         /* (num_partials, num_heads, value_dim + 2): weighted sum, max, sum; of base-2 scores */
  const float *sinks;      /* (num_heads,), or null */
  int32_t num_heads;
  int32_t num_items;
  int32_t num_merges;
  int32_t window;          /* positions that a row sees, its own included; 0 sees all before it */
  int32_t section_keys;    /* a multiple of 32 */
  float scale;
  float soft_cap;          /* 0 is none */
  int32_t num_threads;
} ost_attention;

OST_EXPORT void ost_attend(const ost_attention *attention);

#ifdef __cplusplus
}
#endif
#endif
