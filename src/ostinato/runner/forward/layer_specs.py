"""The arguments of operations between products, besides rows of numbers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm (Zhang and Sennrich, arXiv 1910.07467).

    Attributes:
        weight: Shape (width,).
        epsilon: Added to the mean of squares.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of projected numbers is cut into heads.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys, and of values.
        dim: Numbers of a head, even.
        query_norm: Norm of each query head; None is none.
        key_norm: Norm of each key head, there where ``query_norm`` is.
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    query_norm: Norm | None
    key_norm: Norm | None

    @property
    def num_projected(self) -> int:
        """Numbers of a projected row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


@dataclass(frozen=True, slots=True)
class Heads:
    """Where the heads of a step are, one row per token.

    Attributes:
        queries: Shape (num_tokens, num_heads * dim).
        keys: Shape (num_tokens, num_kv_heads * dim).
        values: Likewise.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, first: int, last: int) -> "Heads":
        """Return a view of some rows."""
        return Heads(self.queries[first:last], self.keys[first:last], self.values[first:last])


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """The angles of a step's positions (RoPE; Su et al., arXiv 2104.09864).

    Attributes:
        cosines: Shape (num_tokens, dim), the dtype of the queries.
        sines: Likewise.
    """

    cosines: Tensor
    sines: Tensor

    def rows(self, first: int, last: int) -> "RopeAngles":
        """Return a view of some rows."""
        return RopeAngles(self.cosines[first:last], self.sines[first:last])
