"""Kernels in Triton: one source for NVIDIA and AMD; on a CPU, Triton's interpreter runs it.

Triton is imported with this file, at the first step. One program of ``attend``
computes a part of a plan (``read_parts``) for one head of keys: the rows of its tokens and of the
query heads that share these keys are one operand of a matrix product::

    queries  (tokens of the tile * GROUP, KEY_PAD)  ·  keys (KEY_PAD, TILE_KEYS)  ->  scores
    weights  (tokens of the tile * GROUP, TILE_KEYS) · values (TILE_KEYS, VALUE_PAD)  -> sums

Scores are logarithms to base 2. The softmax runs over tiles of keys (Milakov and Gimelshein, arXiv
1805.02867; Dao et al., arXiv 2205.14135), and partial results are merged by their log-sum-exp in
the order of keys, by the one function ``_merge``, in a program or between programs.

Stores have the layout of ``kv.plain_store``: a row of elements per slot and head, or in int8 a row
of codes and its scale, which a second pointer reads as a float.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(float("-inf"))
MAX_CODE = tl.constexpr(127.0)
MIN_SIZE = tl.constexpr(1e-33)
TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, halves to even


@triton.jit
def _no_lower(peak):
    """Return peaks with 0 for those of nothing, so that differences are numbers."""
    return tl.where(peak == LOWEST, 0.0, peak)


@triton.jit
def _no_zero(weight):
    """Return weights with 1 for those of nothing, to divide by."""
    return tl.where(weight == 0.0, 1.0, weight)


@triton.jit
def _operand(values, query, IS_WIDENED: tl.constexpr):
    """Return an operand of a product with queries, in their format.

    Triton's interpreter can neither multiply bfloat16 nor round to it: there it is float32.
    """
    return values.to(tl.float32 if IS_WIDENED else query.dtype)


@triton.jit
def _merge(peak, weight, total, log_sum, mean):
    """Add a partial result to a running one."""
    new = tl.maximum(peak, log_sum)
    safe = _no_lower(new)
    kept, added = tl.exp2(peak - safe), tl.exp2(log_sum - safe)
    return new, weight * kept + added, total * kept[:, None] + mean * added[:, None]


@triton.jit
def _sum_keys(
    query, positions, first, end, kv_head, table, blocks, keys, key_scales, values, value_scales,
    scale, soft_cap, window,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, ROWS: tl.constexpr,
    IS_CODES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Return the log-sum-exp and the mean of values of some keys."""
    peak = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    for start in range(first, end, TILE_KEYS):
        at = start + tl.arange(0, TILE_KEYS)
        inside = at < end
        block = tl.load(blocks + table + at // BLOCK_SIZE, mask=inside, other=0)
        place = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * KV_HEADS + kv_head
        key = tl.load(
            keys + place[None, :] * KEY_ROW + key_dims[:, None],
            mask=inside[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0,
        )
        key = _operand(key, query, IS_WIDENED)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if IS_CODES:
            factors = key_scales + (place * KEY_ROW + KEY_DIM) // 4
            scores *= tl.load(factors, mask=inside, other=0.0)[None, :]
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        seen = inside[None, :] & (at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores * LOG2_E, LOWEST)
        new = tl.maximum(peak, tl.max(scores, 1))
        safe = _no_lower(new)
        weights, kept = tl.exp2(scores - safe[:, None]), tl.exp2(peak - safe)
        weight = weight * kept + tl.sum(weights, 1)
        value = tl.load(
            values + place[:, None] * VALUE_ROW + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0,
        )
        if IS_CODES:
            factors = value_scales + (place * VALUE_ROW + VALUE_DIM) // 4
            weights *= tl.load(factors, mask=inside, other=0.0)[None, :]
        weights, value = _operand(weights, query, IS_WIDENED), _operand(value, query, IS_WIDENED)
        sums = tl.dot(weights, value, input_precision="ieee")
        total = total * kept[:, None] + sums
        peak = new
    # Rows that see none of the keys have weight 0, and a log-sum-exp that adds nothing.
    weight = _no_zero(weight)
    return peak + tl.log2(weight), total / weight[:, None]


@triton.jit
def attend(
    queries, keys, key_scales, values, value_scales, sinks, output, means, log_sums,
    tokens, positions, blocks, parts, scale, soft_cap, window, query_token, query_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, ROWS: tl.constexpr, SECTION: tl.constexpr,
    IS_CODES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Compute one part for one head of keys; grid (num_parts, num_kv_heads)."""
    part, kv_head = parts + tl.program_id(0) * 6, tl.program_id(1)
    num_rows, table = tl.load(part + 1), tl.load(part + 2)
    first, end, partial = tl.load(part + 3), tl.load(part + 4), tl.load(part + 5)
    index = tl.arange(0, ROWS)
    within, head = index // GROUP, kv_head * GROUP + index % GROUP
    real = within < num_rows
    row = tl.load(part) + within
    token = tl.load(tokens + row, mask=real, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=real, other=-1)
    dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    query = tl.load(
        queries + (token * query_token + head * query_head)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    query = _operand(query, query, IS_WIDENED)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 -- known when compiled, and the next one is not
        if partial < 0:  # else they count when partial results are merged
            peak = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
            weight = tl.full([ROWS], 1.0, tl.float32)
    step = end - first if SECTION == 0 else SECTION
    for low in range(first, end, step):
        log_sum, mean = _sum_keys(
            query, position, low, tl.minimum(low + step, end), kv_head, table, blocks,
            keys, key_scales, values, value_scales, scale, soft_cap, window,
            KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, KEY_ROW, VALUE_ROW,
            BLOCK_SIZE, TILE_KEYS, ROWS, IS_CODES, HAS_CAP, HAS_WINDOW, IS_WIDENED,
        )  # fmt: skip
        peak, weight, total = _merge(peak, weight, total, log_sum, mean)
    weight = _no_zero(weight)
    mean = total / weight[:, None]
    written = real[:, None] & (value_dims < VALUE_DIM)[None, :]
    num_heads = KV_HEADS * GROUP
    if partial < 0:
        target = output + (token * num_heads + head)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(target, mean.to(output.dtype.element_ty), mask=written)
    else:
        place = (partial + within).to(tl.int64) * num_heads + head
        tl.store(means + place[:, None] * VALUE_DIM + value_dims[None, :], mean, mask=written)
        tl.store(log_sums + place, peak + tl.log2(weight), mask=real)


@triton.jit
def merge(
    means, log_sums, sinks, output, tokens, starts, partials, num_heads,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row and some heads; grid (num_merges, head tiles)."""
    row, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    token = tl.load(tokens + row + 0 * head).to(tl.int64)
    dims, real = tl.arange(0, VALUE_PAD), (head < num_heads) & (token >= 0)  # padding has no row
    written = real[:, None] & (dims < VALUE_DIM)[None, :]
    peak = tl.full([HEADS], LOWEST, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, VALUE_PAD], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
        weight = tl.full([HEADS], 1.0, tl.float32)
    for index in range(first, end):
        place = tl.load(partials + index).to(tl.int64) * num_heads + head
        log_sum = tl.load(log_sums + place, mask=real, other=0.0)
        values = means + place[:, None] * VALUE_DIM + dims[None, :]
        mean = tl.load(values, mask=written, other=0.0)
        peak, weight, total = _merge(peak, weight, total, log_sum, mean)
    place = token * num_heads + head
    mean = (total / _no_zero(weight)[:, None]).to(output.dtype.element_ty)
    tl.store(output + place[:, None] * VALUE_DIM + dims[None, :], mean, mask=written)


@triton.jit
def store(
    rows, kept, scales, slots, num_tokens, row_token, row_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROW: tl.constexpr,
    TOKENS: tl.constexpr, IS_CODES: tl.constexpr,
):  # fmt: skip
    """Write new keys or values of one head into slots; grid (token tiles, HEADS)."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    dims, real = tl.arange(0, PAD), token < num_tokens
    slot = tl.load(slots + token, mask=real, other=-1).to(tl.int64)
    real = slot >= 0  # padding rows have none
    inside = real[:, None] & (dims < DIM)[None, :]
    place = (slot * HEADS + head) * ROW
    source = (token.to(tl.int64) * row_token + head * row_head)[:, None] + dims[None, :]
    target = kept + place[:, None] + dims[None, :]
    row = tl.load(rows + source, mask=inside, other=0.0)
    if IS_CODES:  # as ``kv.kv_codes.encode``
        row = row.to(tl.float32)
        finite = tl.abs(row) < float("inf")
        row = tl.where(finite, row, 0.0)
        size = tl.max(tl.abs(row), 1)
        per_unit = tl.where(size >= MIN_SIZE, MAX_CODE / tl.maximum(size, MIN_SIZE), 0.0)
        broken = tl.sum(tl.where(finite, 0, 1), 1) > 0
        codes = (row * tl.where(broken, 0.0, per_unit)[:, None] + TO_EVEN) - TO_EVEN
        tl.store(target, codes.to(tl.int8), mask=inside)
        scale = tl.where(broken, float("nan"), size / MAX_CODE)
        tl.store(scales + (place + DIM) // 4, scale, mask=real)
    else:
        tl.store(target, row.to(kept.dtype.element_ty), mask=inside)


IS_INTERPRETED = not isinstance(attend, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter, on a CPU."""
