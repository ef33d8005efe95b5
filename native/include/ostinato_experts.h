/* Mixtures of experts: which experts a row goes to, and what they compute.
 *
 * As in ostinato_native.h: a plain C ABI, and the caller has checked every bound
 * (src/ostinato/runner/experts/).
 */
#ifndef OSTINATO_EXPERTS_H
#define OSTINATO_EXPERTS_H

#include "ostinato_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How logits become scores: over all experts, each by itself, or over the chosen ones alone; or in rounds, of
 * which each chooses the best logit, weighed by a softmax of those that are near enough to it and that no round
 * before it chose (Phi's sparse mixer; Liu et al., arXiv 2409.12136). */
enum ost_scores {
  OST_SOFTMAX = 0,
  OST_SIGMOID = 1,
  OST_SOFTMAX_OF_CHOSEN = 2,
  OST_SIGMOID_OF_CHOSEN = 3,
  OST_SPARSE_MIXER = 4
};

/* The top_k experts of each row by score, best first; of equal scores, the first.
 *
 * With groups, neighbouring experts are one group, and only the best kept_groups groups are chosen from;
 * a group is as good as the sum of its group_best best experts. */
typedef struct ost_routing {
  ost_matrix logits;       /* (num_rows, num_experts) */
  const float *correction; /* (num_experts,), added to scores for the choice alone; or null */
  int64_t *experts;        /* (num_rows, top_k) */
  float *weights;          /* (num_rows, top_k), rounded to weight_dtype */
  int32_t num_rows;
  int32_t num_experts;
  int32_t top_k;
  int32_t dtype; /* of logits, any format */
  int32_t weight_dtype;
  int32_t scores;
  int32_t num_groups; /* 1 is none */
  int32_t kept_groups;
  int32_t group_best;
  int32_t divides; /* weights by their sum, at least `floor`, with `epsilon` added */
  float epsilon;
  float floor;
  float scale; /* of weights, at last */
  float cap;    /* logits become cap * tanh(logit / cap); 0 is none */
  float jitter; /* of the sparse mixer: logits count down to 2 * jitter below the best, by the size of both */
  int32_t num_threads;
} ost_routing;

OST_EXPORT void ost_route(const ost_routing *routing);

/* outputs = sum over a row's experts of weight * (gated(inputs x gate_up^T) x down^T).
 *
 * The weights of all experts are one packed weight, each expert's outputs a multiple of 32: gate_up has
 * `inner` gates, then as many ups if there are any; `inner` is a multiple of 32. gate_up and down describe the first
 * expert; their inputs, outputs and num_rows are not used. If inputs have an order, each expert has one,
 * after that of the expert before. A row's sum is in float, over its experts in
 * ascending order, so that it does not depend on the rows beside it.
 *
 * Adapters update both products of their rows as ost_lora says, in float32 and bfloat16: of a group's
 * layers, those from adapter_layer on are of each expert's gate_up, and those after them of each down. */
typedef struct ost_experts {
  ost_matrix inputs;      /* (num_rows, gate_up.num_inputs), any format */
  ost_matrix outputs;     /* (num_rows, down.num_outputs) */
  const int64_t *experts; /* (num_rows, top_k), of a row all different */
  const float *weights;   /* (num_rows, top_k) */
  ost_product gate_up;    /* bias: (num_experts, its num_outputs), or null */
  ost_product down;       /* bias: (num_experts, num_outputs), or null */
  int32_t num_rows;
  int32_t num_experts;
  int32_t top_k;
  int32_t activation; /* OST_RELU_SQUARED without ups, others with them */
  int32_t has_up;
  float alpha;
  float limit;
  int32_t num_threads;
  const ost_lora_step *adapters; /* rows of which are those of this call; null for none */
  int64_t adapter_layer;
} ost_experts;

OST_EXPORT void ost_run_experts(const ost_experts *op);

#ifdef __cplusplus
}
#endif
#endif
