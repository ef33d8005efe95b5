"""Finds out what an attention module makes of its projected rows.

Between its projections and its output projection, a module splits rows into heads, norms and turns
them, and attends. It is called with stand-ins for its linear layers and for attention, which keeps
what it was given; that is compared with each kind of RoPE and of norms that the library has.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.forward.embedding_and_rope import AngleLayout
from ostinato.runner.forward.ops import HeadShape, Norm, Rope, RopeKind
from ostinato.runner.forward.stand_ins import (
    NUM_ROWS,
    Unknown,
    answering_linears,
    apply_norm,
    call_keywords,
    call_twin,
    is_close,
    norm_of,
    random_rows,
)


def heads_of(
    attention: nn.Module,
    projections: tuple[str, ...],
    output: str,
    norms: tuple[str, ...] | None,
    angles: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[HeadShape, AttentionStyle]:
    """Return what an attention module makes of its projected rows, and how it attends.

    Args:
        attention: The module, with our attention.
        projections: Names of the linear layers that give queries, keys and values.
        output: Name of the output projection.
        norms: Names of the norms of queries and keys; None if there are none.
        angles: The model's cosines and sines of some positions, of which layout and dtype count.
        dtype: The model's.

    Raises:
        Unknown: It computes something else.
    """
    linears = [cast(nn.Linear, attention.get_submodule(name)) for name in (*projections, output)]
    dim = next((d for n in ("head_dim", "head_size") if (d := getattr(attention, n, None))), None)
    if not isinstance(dim, int) or linears[-1].in_features % dim:
        raise Unknown(f"heads of {type(attention).__name__} are not of one size")
    num_heads = linears[-1].in_features // dim
    num_projected = sum(linear.out_features for linear in linears[:-1]) // dim
    is_gated = len(linears) > 2 and linears[0].out_features == 2 * num_heads * dim
    num_kv_heads = (num_projected - (1 + is_gated) * num_heads) // 2
    shape = HeadShape(num_heads, num_kv_heads, dim, is_gated=is_gated)
    if num_kv_heads < 1 or shape.num_projected != sum(n.out_features for n in linears[:-1]):
        raise Unknown(f"{type(attention).__name__} projects other than queries, keys and values")
    random = torch.Generator().manual_seed(0)
    children = answering_linears(attention, (*projections, output), dtype, random)
    numbers = None if angles is None else tuple(_angles_like(each, random) for each in angles)
    seen = _Attending(random_rows((NUM_ROWS, num_heads, dim), dtype, random))
    rows = random_rows((1, NUM_ROWS, linears[0].in_features), dtype, random)
    call_twin(attention, children, rows, call_keywords(attention, seen, numbers, None))
    projected = torch.cat([children[name].answer[0] for name in projections], dim=-1)
    shape, queries, keys = _split(shape, projected, seen)
    attended = seen.attended.flatten(1)
    if is_gated:
        heads = projected[:, : 2 * num_heads * dim].unflatten(1, (num_heads, 2, dim))
        attended = attended * heads[:, :, 1].flatten(1).sigmoid()
    last = children[output].inputs
    if not last or not torch.equal(last[0].flatten(), attended.flatten()):
        raise Unknown(f"{type(attention).__name__} changes what was attended")
    if norms is not None:
        query_norm, key_norm = (norm_of(attention.get_submodule(name)) for name in norms)
        is_of_all = query_norm.weight is not None and query_norm.weight.shape == (num_heads * dim,)
        shape = replace(
            shape,
            query_norm=query_norm,
            key_norm=key_norm,
            is_norm_of_all=is_of_all and num_heads > 1,
        )
    turned = _turned(shape, queries, keys, numbers, seen)
    return turned, cast(AttentionStyle, seen.style)


class _Attending:
    """In place of a step's attention: keeps queries, keys and values, and gives random rows."""

    states = None

    def __init__(self, attended: Tensor) -> None:
        self.attended = attended
        self.style: AttentionStyle | None = None

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        self.queries, self.keys, self.values, self.style = queries, keys, values, style
        return self.attended


def _split(
    shape: HeadShape, projected: Tensor, seen: _Attending
) -> tuple[HeadShape, Tensor, Tensor]:
    """Return where queries, keys and values are in projected rows, and the first two of them."""
    if seen.style is None:
        raise Unknown("it does not attend through the interface")
    choices = [shape]
    if shape.num_heads == shape.num_kv_heads:
        choices.append(replace(shape, is_interleaved=True))
    for choice in choices:
        stride, kv_stride, first_key, first_value = choice.places()
        parts = [
            torch.stack([projected[:, first + h * s :][:, : shape.dim] for h in range(n)], dim=1)
            for first, s, n in (
                (0, stride, shape.num_heads),
                (first_key, kv_stride, shape.num_kv_heads),
                (first_value, kv_stride, shape.num_kv_heads),
            )
        ]
        if seen.values.shape == parts[2].shape and torch.equal(seen.values, parts[2]):
            return choice, parts[0], parts[1]
    raise Unknown("its values are not rows of a projection")


def _turned(
    shape: HeadShape,
    queries: Tensor,
    keys: Tensor,
    angles: tuple[Tensor, ...] | None,
    seen: _Attending,
) -> HeadShape:
    """Return how queries and keys are normed and turned; the closest where several are close."""
    best: tuple[int, HeadShape] | None = None
    for rope, is_last in product(_ropes(shape, angles), (False, True)):
        choice = replace(shape, rope=rope, is_norm_last=is_last)
        misses = 0
        for raw, norm, turned in (
            (queries, shape.query_norm, seen.queries),
            (keys, shape.key_norm, seen.keys),
        ):
            expected = _normed_and_turned(choice, norm, raw, angles)
            if not is_close(expected, turned, raw.dtype):
                break
            misses += int((expected != turned).sum())
        else:
            if best is None or misses < best[0]:
                best = misses, choice
    if best is None:
        raise Unknown("its queries and keys are normed or turned in another way")
    return best[1]


def _ropes(shape: HeadShape, angles: tuple[Tensor, ...] | None) -> Iterator[Rope]:
    yield Rope()
    if angles is None:
        return
    dim = angles[0].shape[-1] * (2 if layout_of(angles[0]) is AngleLayout.SINGLE else 1)
    if dim <= shape.dim:
        for rounded in (True, False):
            for kind in (RopeKind.HALVES, RopeKind.NEIGHBOURS):
                yield Rope(kind, dim, rounded)


def layout_of(angles: Tensor) -> AngleLayout:
    """Return where the angles of pairs are in a row that the model's module gives."""
    if angles.shape[-1] % 2:
        return AngleLayout.SINGLE
    if torch.equal(*angles.chunk(2, dim=-1)):
        return AngleLayout.HALVES
    if torch.equal(angles[..., ::2], angles[..., 1::2]):
        return AngleLayout.REPEATED
    return AngleLayout.SINGLE


def _angles_like(angles: Tensor, random: torch.Generator) -> Tensor:
    """Return random numbers in the layout of some angles, shape (1, num_rows, dim)."""
    layout = layout_of(angles)
    width = angles.shape[-1] // (1 if layout is AngleLayout.SINGLE else 2)
    pairs = random_rows((1, NUM_ROWS, width), angles.dtype, random)
    if layout is AngleLayout.REPEATED:
        return pairs.repeat_interleave(2, dim=-1)
    return pairs if layout is AngleLayout.SINGLE else torch.cat((pairs, pairs), dim=-1)


def _normed_and_turned(
    shape: HeadShape, norm: Norm | None, heads: Tensor, angles: tuple[Tensor, ...] | None
) -> Tensor:
    def normed(rows: Tensor) -> Tensor:
        if norm is None:
            return rows
        flat = rows.flatten(1) if shape.is_norm_of_all else rows
        return apply_norm(norm, flat).view(rows.shape)

    heads = heads if shape.is_norm_last else normed(heads)
    if angles is not None and shape.rope.kind != RopeKind.NONE:
        heads = turn(heads, shape.rope, angles)
    return normed(heads) if shape.is_norm_last else heads


def turn(heads: Tensor, rope: Rope, angles: tuple[Tensor, ...]) -> Tensor:
    """Turn heads, shape (num_rows, num_heads, dim)."""
    dtype = heads.dtype
    cosines, sines = (layout_of(a).of_pairs(a[0]).float()[:, None] for a in angles)
    turned, rest = heads[..., : rope.dim].float(), heads[..., rope.dim :]
    is_halves = rope.kind == RopeKind.HALVES
    first, second = turned.chunk(2, -1) if is_halves else (turned[..., ::2], turned[..., 1::2])

    def times(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).to(dtype).float() if rope.are_rounded else a * b

    pairs = (
        (times(first, cosines) - times(second, sines)).to(dtype),
        (times(second, cosines) + times(first, sines)).to(dtype),
    )
    joined = torch.cat(pairs, dim=-1) if is_halves else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((joined, rest), dim=-1)
