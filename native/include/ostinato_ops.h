/* Operations of the native library that are neither products nor attention.
 *
 * Each call passes over memory once and rounds where the models of transformers round, so that
 * what comes out differs from theirs by the order of sums alone. As in ostinato_native.h: a plain
 * C ABI, and whoever calls has checked every bound (src/ostinato/runner/forward/ops.py).
 *
 * Formats are OST_FLOAT32 and OST_BFLOAT16 unless said otherwise; strides and sizes are in elements.
 */
#ifndef OSTINATO_OPS_H
#define OSTINATO_OPS_H

#include "ostinato_native.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of numbers, each row's side by side: element (row, column) is at row * stride + column. */
typedef struct ost_matrix {
  void *data;
  int64_t stride;
} ost_matrix;

/* A norm of rows: (x - center) / sqrt(mean((x - center)^2) + epsilon) * (weight + offset) + bias, where the center
 * is 0 or the mean. */
typedef struct ost_norm {
  const void *weight; /* null for 1 */
  const void *bias;   /* null for 0 */
  float epsilon;
  float offset;
  int32_t kind;       /* ost_norm_kind */
  int32_t is_rounded; /* before it is weighed as well */
} ost_norm;

enum ost_norm_kind { OST_NO_NORM = 0, OST_RMS_NORM = 1, OST_LAYER_NORM = 2 };

/* residual += scale * sigmoid(gate) * normed(addend); output = normed(residual), row by row. */
typedef struct ost_add_norm {
  ost_matrix residual; /* (num_rows, width), changed where there is an addend */
  ost_matrix addend;   /* (num_rows, width), or null */
  ost_matrix output;   /* (num_rows, width), or null */
  ost_norm norm;       /* of the output */
  ost_norm addend_norm; /* may be none */
  int64_t num_rows;
  int32_t width;
  int32_t dtype;
  float scale; /* of the addend, after its norm and gate */
  int32_t num_threads;
  ost_matrix gates; /* (num_rows, 1), or null */
} ost_add_norm;

/* How queries and keys are turned by their position (RoPE). Numbers of a head from rotary_dim on stay as they are. */
enum ost_rope {
  OST_NO_ROPE = 0,
  OST_HALVES = 1,    /* number i and number i + rotary_dim / 2 are a pair */
  OST_NEIGHBOURS = 2 /* number 2 * i and number 2 * i + 1 are a pair */
};

/* Take projected rows apart into heads: queries and keys normed and turned, values as they are.
 *
 * Heads of queries are at query_stride from each other in a projected row, those of keys and values at
 * kv_stride, and the first key and value at key_offset and value_offset. */
typedef struct ost_heads {
  ost_matrix projected; /* (num_rows, all heads) */
  ost_matrix queries;   /* (num_rows, num_heads * head_dim) */
  ost_matrix keys;      /* (num_rows, num_kv_heads * head_dim) */
  ost_matrix values;    /* (num_rows, num_kv_heads * head_dim) */
  ost_matrix angles;    /* (num_rows, rotary_dim) floats: cosines of pairs, then sines */
  ost_norm query_norm;  /* may be none */
  ost_norm key_norm;
  int64_t num_rows;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim; /* even, at most head_dim */
  int32_t query_stride;
  int32_t kv_stride;
  int32_t key_offset;
  int32_t value_offset;
  int32_t rope;          /* ost_rope */
  int32_t are_rounded;   /* products with cosines and sines, before they are added */
  int32_t is_norm_last;  /* queries and keys are turned before they are normed */
  int32_t weight_stride; /* of one head's weights to the next one's; 0 if heads share them */
  int32_t is_norm_of_all; /* one norm over all heads */
  int32_t dtype;
  int32_t num_threads;
} ost_heads;

enum ost_activation {
  OST_SILU = 0,
  OST_GELU = 1,      /* by the error function */
  OST_GELU_TANH = 2, /* its approximation by tanh */
  OST_RELU = 3,
  OST_RELU_SQUARED = 4,
  OST_CLAMPED = 5 /* of experts: (up + 1) * gate * sigmoid(alpha * gate), of clamped gates and ups (gpt-oss) */
};

/* output = activation(gate) * up, or activation(gate). */
typedef struct ost_gated {
  ost_matrix gate_up; /* (num_rows, 2 * width): gate, then up; (num_rows, width) without ups */
  ost_matrix output;  /* (num_rows, width) */
  int64_t num_rows;
  int32_t width;
  int32_t dtype;
  int32_t activation; /* ost_activation */
  int32_t has_up;
  int32_t num_threads;
} ost_gated;

/* Where each row has its largest number, the first of several; -1 where that is not finite, or where
 * there is a NaN. */
typedef struct ost_best {
  ost_matrix numbers; /* (num_rows, width), of any format */
  int64_t *places;    /* (num_rows,) */
  int64_t num_rows;
  int32_t width; /* at least 1 */
  int32_t dtype;
  int32_t num_threads;
} ost_best;

/* Many tokens of each of some sequences of one length, through the gated delta rule or Mamba 2; see
 * ops/scan.h. Rows of matrices are tokens, all of a sequence's after all of the one before. */
typedef struct ost_scan {
  float *states;      /* (num_sequences, num_heads, key_dim, value_dim), changed */
  ost_matrix queries; /* (num_sequences * num_tokens, num_key_heads * key_dim), of dtype */
  ost_matrix keys;    /* likewise */
  ost_matrix values;  /* (num_sequences * num_tokens, num_heads * value_dim), of dtype */
  ost_matrix outputs; /* likewise, of output_dtype */
  const float *gates; /* logs of decays, (num_sequences * num_tokens, num_heads) at gate_stride; with
                         has_steps (num_heads,): what a step is multiplied by to give one */
  const float *betas; /* by what values are multiplied, (num_sequences * num_tokens, num_heads) likewise;
                         with has_steps what softplus makes steps of */
  const float *skips; /* (num_heads,): outputs get so many times their values too; may be null */
  int64_t num_rows;   /* num_sequences * num_heads */
  int64_t gate_stride;
  int32_t num_tokens;
  int32_t num_heads; /* a multiple of num_key_heads */
  int32_t num_key_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t dtype;            /* float32 or bfloat16 */
  int32_t output_dtype;     /* likewise */
  int32_t is_delta;         /* whether a value is corrected by what the state has for its key */
  int32_t has_norms;        /* whether queries and keys are made of length 1 first */
  int32_t has_values_first; /* whether a head's state is (value_dim, key_dim) */
  int32_t has_steps;        /* whether betas are steps of time, rounded to dtype */
  float query_scale;
  float min_step;
  float max_step; /* may be infinite */
  int32_t num_threads;
} ost_scan;

/* A causal convolution of each channel of some sequences of one length, rounded before SiLU. */
typedef struct ost_convolution {
  ost_matrix inputs;    /* (num_sequences * num_tokens, width), of dtype */
  const void *earlier;  /* the inputs before, (num_sequences, num_taps - 1, width), of dtype */
  const float *weights; /* (num_taps, width), the last for the token itself */
  const float *bias;    /* (width,), may be null */
  ost_matrix outputs;   /* like inputs */
  int64_t num_rows;     /* num_sequences * num_tokens */
  int32_t num_tokens;
  int32_t width;
  int32_t num_taps; /* at most 16 */
  int32_t dtype;    /* float32 or bfloat16 */
  int32_t has_silu;
  int32_t num_threads;
} ost_convolution;

/* The sequences of a step: sequence i has rows starts[i] .. starts[i + 1] - 1, and its state in slots[i]. */
typedef struct ost_sequences {
  const int64_t *starts;   /* (num_sequences + 1,) */
  const int64_t *slots;    /* (num_sequences,), all different */
  const int64_t *is_fresh; /* (num_sequences,): whether it begins here, so that its slot is overwritten */
  int64_t num_sequences;
} ost_sequences;

/* Channels that are side by side, in a projected row as in a convolved one. */
typedef struct ost_channels {
  int32_t column;  /* of the first in a projected row */
  int32_t channel; /* of the first in a convolved one */
  int32_t width;   /* at most 256 */
} ost_channels;

/* A layer's convolution and its scan, for all rows of a step; see ops/mixer.h.
 *
 * scan says of what kind it is: its states have all slots, and its queries, keys, values, outputs, gates
 * and betas all rows. Of one token of a sequence that does not begin with it, a step is computed. */
typedef struct ost_mixer {
  ost_scan scan; /* numbers of rows and tokens are of no account; has_steps is 0 */
  const ost_sequences *step;
  ost_matrix projected; /* (num_rows, any), of scan.dtype */
  ost_matrix convolved; /* (num_rows, num_channels), likewise */
  ost_matrix stepped;   /* (num_rows, any), likewise: has what decays and betas are made of */
  void *earlier;        /* (num_slots, num_channels, num_taps - 1), of scan.dtype: inputs before; changed */
  const ost_channels *channels; /* (num_runs,), all channels together */
  const void *weights;          /* (num_channels, num_taps), of scan.dtype, the last for the token itself */
  const void *bias;             /* (num_channels,), of scan.dtype; may be null */
  const int32_t *decay_columns; /* (num_heads,), of stepped */
  const int32_t *beta_columns;  /* likewise; null where values are multiplied by steps (Mamba 2) */
  const void *log_rates;        /* (num_heads,), of rates_dtype: the log of a decay is -e^rate * */
  const void *shifts;           /* (num_heads,), of shifts_dtype    softplus(column + shift) */
  const void *skips;            /* (num_heads,), of skips_dtype, in place of scan.skips; may be null */
  int32_t num_runs;
  int32_t num_channels;
  int32_t num_taps; /* 2 to 16 */
  int32_t has_silu;
  int32_t rates_dtype; /* float32 or bfloat16, each */
  int32_t shifts_dtype;
  int32_t skips_dtype;
  float beta_factor; /* on the sigmoid that is a beta */
} ost_mixer;

/* output = normed(input) * open(gate), or normed(input * open(gate)), by groups of numbers of a row. */
typedef struct ost_gated_norm {
  ost_matrix inputs; /* (num_rows, num_groups * width), of input_dtype */
  ost_matrix gates;  /* (num_rows, any), of dtype */
  ost_matrix output; /* (num_rows, num_groups * width), of dtype */
  const int32_t *columns; /* (num_groups,): where a group's gates begin in a row of gates */
  ost_norm norm;     /* an RMSNorm or none; weights of dtype, without bias and offset; rounds to input_dtype */
  int64_t num_rows;
  int32_t num_groups;
  int32_t width;
  int32_t weight_stride; /* of one group's weights to the next one's; 0 if groups share them */
  int32_t dtype;
  int32_t input_dtype;
  int32_t is_gated_first;
  int32_t is_sigmoid; /* a rounded sigmoid opens gates; else SiLU, which is not rounded */
  int32_t num_threads;
} ost_gated_norm;

/* Rows of a weight and their place in a packed one, see weights/tiles.h. */
typedef struct ost_packing {
  void *tiles;          /* ost_packed_size elements, zero wherever nothing was packed */
  ost_matrix rows;      /* (num_rows, num_inputs) */
  int64_t first_output; /* the output that the first row is */
  int64_t num_rows;
  int32_t num_inputs;
  int32_t dtype; /* any format */
  int32_t num_threads;
} ost_packing;

/* Elements of a packed weight. */
OST_EXPORT int64_t ost_packed_size(int64_t num_outputs, int64_t num_inputs);
/* Write rows into tiles; read them back. */
OST_EXPORT void ost_pack(const ost_packing *packing);
OST_EXPORT void ost_unpack(const ost_packing *packing);

/* How a packed weight's numbers are kept: as the product's format, or as codes of fewer bits, in pairs or in
 * blocks. Blocks are multiplied by instruction sets from OST_NEON_DOTPROD on, elsewhere by plain C++, and not
 * with rows of float16 as they are. */
enum ost_weight_format {
  OST_PLAIN = 0,
  OST_INT8 = 1,
  OST_INT4 = 2,
  OST_INT8_BLOCKS = 3,
  OST_INT4_BLOCKS = 4,
  OST_MXFP4 = 5, /* as OST_INT4, but codes are places in a table of numbers, see weights/code_tables.h */
  OST_IQ4 = 6,
  OST_MXFP4_BLOCKS = 7,
  OST_IQ4_BLOCKS = 8
};

/* A format of scales and minima of codes, beside those of ost_dtype: for each superblock of 256 inputs
 * and each tile, a float16 factor of each output, then a signed byte of each group and output. */
enum ost_scale_format { OST_SUPERBLOCKS = 4 };

/* What rows are before they are packed as codes: codes in bytes, numbers, or blocks of a GGUF file. */
enum ost_row_kind {
  OST_ROWS_CODES = 0,   /* kept as they are, without scales */
  OST_ROWS_NUMBERS = 1, /* the nearest codes; in 4 bits, with minima alone */
  OST_ROWS_Q4_0 = 2,
  OST_ROWS_Q4_1 = 3,
  OST_ROWS_Q5_0 = 4,
  OST_ROWS_Q5_1 = 5,
  OST_ROWS_Q8_0 = 6,
  OST_ROWS_Q4_K = 7,
  OST_ROWS_Q5_K = 8,
  OST_ROWS_Q6_K = 9,
  OST_ROWS_Q2_K = 10,
  OST_ROWS_Q3_K = 11,
  OST_ROWS_IQ4_NL = 12,
  OST_ROWS_IQ4_XS = 13,
  OST_ROWS_MXFP4 = 14,
  OST_ROWS_MXFP4_PAIRS = 15 /* likewise, neighbouring inputs in a byte, as gpt-oss is published */
};

/* Rows, and their place in a packed weight of codes. Blocks of 5, 6 and 8 bits are packed in 8 bits; those of
 * up to 4 bits in either, and those with tables also in the format of their table. A weight with minima takes rows without, whose minima are 0. */
typedef struct ost_code_packing {
  void *tiles;          /* see weights/tiles.h; of the outputs of these rows, all inputs are written */
  void *scales;         /* [output / 32][group][32] of scale_dtype, or superblocks, or null */
  void *minima;         /* likewise */
  const void *rows;     /* row_bytes each */
  const int64_t *order; /* (num_rows,), which row each output is; null if they are in order */
  int64_t row_bytes;
  int64_t first_output; /* the output that the first row is */
  int64_t num_rows;
  int32_t num_inputs; /* of blocks, a multiple of their inputs */
  int32_t row_kind;
  int32_t dtype; /* of numbers, any format */
  int32_t weight_format;
  int32_t scale_dtype;
  int32_t group_size; /* inputs, a multiple of 32; of blocks, 32, and 16 or 32 with superblocks */
  int32_t padding;    /* the code of inputs that only fill up the last step */
  int32_t num_threads;
} ost_code_packing;

OST_EXPORT void ost_pack_codes(const ost_code_packing *packing);

/* outputs = inputs x weight^T + bias, all of one format, for a packed weight.
 *
 * A weight of codes is code * scale + minimum or (code - zero) * scale, with a scale and a minimum or a zero for
 * each group of inputs of an output, [output / 32][group][32]. Codes of 8 bits have a sign. Without minima and
 * zeros, the zero is 0 for codes of 8 bits, and 8 for those of 4 bits.
 *
 * Sums are in float, over inputs in their order: a row's outputs do not depend on the rows beside it.
 */
typedef struct ost_product {
  ost_matrix inputs;  /* (num_rows, num_inputs) */
  ost_matrix outputs; /* (num_rows, num_outputs) */
  const void *tiles;
  const void *bias;   /* (num_outputs,), or null */
  int32_t num_rows;
  int32_t num_inputs;  /* a multiple of 32; inputs that only fill it up are any finite numbers */
  int32_t num_outputs;
  int32_t dtype; /* any format */
  int32_t num_threads;
  int32_t weight_format;
  const void *scales;  /* of codes; else null */
  const void *minima;  /* of codes, or null */
  const void *zeros;   /* of codes, int8_t, or null; never beside minima */
  const int32_t *order; /* of codes: which number of a row each used input is; null if they are in order */
  int32_t scale_dtype; /* of scales and minima, any format, or superblocks */
  int32_t group_size;  /* inputs, a multiple of 32, or 16 with superblocks */
  int32_t used_inputs; /* inputs that do not only fill it up */
  int32_t activation_bits; /* of codes: 8 if rows become integers of 8 bits by their largest; else 0 */
  int32_t activation_group; /* inputs of a row whose largest it is, a multiple of 32; 0 for all of them */
} ost_product;

/* Gates and ups of one product, and gated what the gates let through. product.outputs is
 * gated.gate_up, and may be left as it was: where it is not read, it need not be written. */
typedef struct ost_gated_product {
  ost_product product; /* of 2 * gated.width outputs */
  ost_gated gated;     /* of bfloat16 */
} ost_gated_product;

/* One linear layer's low-rank update: outputs += scale * (inputs x down^T) x up^T, both packed. */
typedef struct ost_lora_part {
  const void *down;     /* (rank, num_inputs) */
  const void *up;       /* (num_outputs, rank) */
  int64_t first_output; /* where its outputs begin among those of a joined product */
  int32_t num_outputs;
  int32_t rank;
  int32_t first_own; /* ranks of its own, where several updates of up to 32 ranks share a tile; the */
  int32_t num_own;   /* others are none of it. 0: all are its own */
  float scale;
} ost_lora_part;

/* An adapter's updates of one product; several where the product joins linear layers. */
typedef struct ost_lora_layer {
  const ost_lora_part *parts;
  int64_t num_parts;
} ost_lora_layer;

/* The rows of a step that one adapter computes. */
typedef struct ost_lora_group {
  const int64_t *rows; /* (num_rows,), ascending */
  int64_t num_rows;
  const ost_lora_layer *layers; /* one per product of the model */
} ost_lora_group;

typedef struct ost_lora_step {
  const ost_lora_group *groups; /* no row is in two of them; rows in none are the base model's */
  int64_t num_groups;
} ost_lora_step;

/* Add the adapters' updates of one product. Both factors' products are rounded to the format, as in
 * peft, and each is as ost_product says: a row's outputs do not depend on the rows beside it. */
typedef struct ost_lora {
  ost_matrix inputs;  /* (num_rows, num_inputs) */
  ost_matrix outputs; /* (num_rows, any), changed in rows of groups alone */
  const ost_lora_step *step;
  int64_t layer;     /* which product */
  int64_t first_row; /* row of the step that inputs and outputs begin with */
  int64_t num_rows;
  int32_t num_inputs;
  int32_t dtype;
  int32_t num_threads;
} ost_lora;

/* Cosines and sines of finite angles up to a million, to a float's last bit and the same on every system;
 * either may be null. */
OST_EXPORT void ost_turns(const float *angles, float *cosines, float *sines, int64_t count);

OST_EXPORT void ost_ops_product(const ost_product *product);
OST_EXPORT void ost_ops_gated_product(const ost_gated_product *op);

OST_EXPORT void ost_ops_add_norm(const ost_add_norm *op);
OST_EXPORT void ost_ops_heads(const ost_heads *op);
OST_EXPORT void ost_ops_gated(const ost_gated *op);
OST_EXPORT void ost_ops_best(const ost_best *op);
OST_EXPORT void ost_ops_lora(const ost_lora *op);
OST_EXPORT void ost_ops_scan(const ost_scan *op);
OST_EXPORT void ost_ops_convolution(const ost_convolution *op);
OST_EXPORT void ost_ops_gated_norm(const ost_gated_norm *op);

#ifdef __cplusplus
}
#endif
#endif
