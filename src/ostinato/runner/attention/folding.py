"""Folds the rows of a step into rectangles for kernels, and back.

The query heads that share a key/value head are folded into rows, so that its keys are read once for
all of them::

    queries  (sequences, num_heads, queries, dim)
          -> (sequences, num_kv_heads, num_heads / num_kv_heads * queries, dim)
"""

from torch import Tensor

from ostinato.runner.attention.read_plan import ReadBatch


def gather_rows(tensor: Tensor, batch: ReadBatch) -> Tensor:
    """Gather a batch's rows, (num_tokens, heads, dim) to (sequences, heads, queries, dim)."""
    picked = tensor.index_select(0, batch.rows)
    shape = (batch.num_sequences, batch.num_queries, *tensor.shape[1:])
    return picked.view(shape).transpose(1, 2)


def scatter_rows(output: Tensor, attended: Tensor, batch: ReadBatch) -> None:
    """Scatter a batch's result, (sequences, heads, queries, ...), into its rows; drop padding."""
    rows, content = batch.rows, attended.transpose(1, 2).flatten(0, 1)
    if batch.real is not None:
        rows, content = rows[batch.real], content[batch.real]
    output.index_copy_(0, rows, content)


def fold_gqa(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Fold query heads that share a key head into its rows."""
    num_sequences, _, _, dim = queries.shape
    return queries.reshape(num_sequences, num_kv_heads, -1, dim)


def unfold_gqa(folded: Tensor, num_heads: int) -> Tensor:
    """Undo ``fold_gqa``: return shape (sequences, heads, queries, ...)."""
    num_sequences, num_kv_heads, num_rows, *rest = folded.shape
    num_queries = num_rows * num_kv_heads // num_heads
    return folded.reshape(num_sequences, num_heads, num_queries, *rest)
