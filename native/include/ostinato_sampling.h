/* Sampling: edits of logits, draws, log-probabilities; one row of logits at a time.
 *
 * A row's results depend on that row alone, and are the same on every instruction set. As in
 * ostinato_native.h: a plain C ABI, and the caller has checked every bound
 * (src/ostinato/runner/native/sampling.py).
 */
#ifndef OSTINATO_SAMPLING_H
#define OSTINATO_SAMPLING_H

#include "ostinato_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the tokens after one row are chosen. Lists are null where they are empty. Edits come in the order of the
 * fields: bias, repetition penalty, penalties of the output, masks, bans. */
typedef struct ost_sample_row {
  const int32_t *bias_ids; /* (num_biases,), all different, below the width */
  const double *biases; /* added in float32 */
  const uint32_t *prompt; /* (num_prompt,), of the repetition penalty; ids beyond the width have no logit */
  const uint32_t *output; /* (num_output,), of all penalties */
  const uint8_t *masks[3]; /* null, or one bit per id: an id whose bit is clear becomes -inf */
  const int64_t *banned;  /* (num_banned,), become -inf; ids beyond the width have no logit */
  const double *uniforms; /* (num_tokens,), each in 0 .. 1; not read where the temperature is 0 */
  int64_t *tokens;        /* (num_tokens,), the choice: the first id whose part of the mass holds the number */
  int64_t num_biases, num_prompt, num_output, num_banned, num_tokens;
  double temperature; /* 0: the first of the most likely */
  double top_p, min_p;
  int32_t top_k; /* 0: all */
  float repetition, frequency, presence;
} ost_sample_row;

/* Log-probabilities of one row before any edit. */
typedef struct ost_logprobs {
  int64_t row;
  const int64_t *tokens; /* (num_tokens,) */
  double *values;        /* (num_tokens + num_alternatives,) */
  int64_t *ranks;        /* (num_tokens,), 1 for the most likely; 0 where the row is no distribution */
  int64_t *alternatives; /* (num_alternatives,), the most likely, of several equal ones the lowest first */
  int64_t num_tokens, num_alternatives;
} ost_logprobs;

/* Logits of a batch, and the sampling parameters of each row. */
typedef struct ost_sampling {
  ost_matrix logits;            /* (any, width), of any format */
  const ost_sample_row *rows;   /* (num_rows,), or null: the row of a log-probability is what it names */
  const ost_logprobs *logprobs; /* (num_rows,), or null; an entry without tokens prefetches for nothing */
  int64_t num_rows;
  int32_t width; /* at least 1 */
  int32_t dtype;
  int32_t num_threads;
} ost_sampling;

/* Sample each row, then compute its log-probabilities; or those alone. A row from which nothing can be sampled
 * has tokens of -1 and no log-probabilities. */
OST_EXPORT void ost_sample(const ost_sampling *sampling);

#ifdef __cplusplus
}
#endif
#endif
