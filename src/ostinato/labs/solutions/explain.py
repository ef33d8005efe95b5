"""Lab 8: why it missed: an explanation whose spans sum to the prompt.

Fill the holes, then run ``ostinato labs check 8``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Earlier:
    """An earlier request, as it is remembered.

    Attributes:
        name: Its name.
        tokens: Its prompt and its answer.
        num_kept: Leading tokens of it that were still cached when the prompt came.
        tenant: Whose it was.
    """

    name: str
    tokens: Sequence[int]
    num_kept: int
    tenant: str = ""


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of a prompt with one reason.

    Attributes:
        start: Position of the first.
        stop: Position after the last.
        reason: ``hit``, ``evicted``, ``block boundary``, ``differs``, ``other tenant``,
            ``never seen`` or ``last token``.
        other: The earlier request that it is about; empty if there is none, or if it is another
            tenant's.
    """

    start: int
    stop: int
    reason: str
    other: str = ""


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the leading tokens that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def nearest(prompt: Sequence[int], earlier: Sequence[Earlier]) -> Earlier | None:
    """Return the earlier request with the longest common prefix; None if no token is shared."""
    # Hole 1 (The nearest prompt): of several that share as much, the newest, which comes last.
    best, longest = None, 0
    for each in earlier:
        count = num_common(prompt, each.tokens)
        if count and count >= longest:
            best, longest = each, count
    return best
    # End of hole 1.


def known_spans(start: int, stop: int, near: Earlier) -> list[Span]:
    """Explain tokens that an earlier request computed, and that did not hit."""
    # Hole 2 (Known, and not found): what is still cached is in a block that was not shared as a
    # whole, a "block boundary"; what comes after near.num_kept is "evicted". Spans may be empty.
    edge = min(max(start, near.num_kept), stop)
    return [
        Span(start, edge, "block boundary", near.name),
        Span(edge, stop, "evicted", near.name),
    ]
    # End of hole 2.


def new_span(start: int, stop: int, near: Earlier | None) -> Span:
    """Explain tokens that no request of this tenant had."""
    # Hole 3 (New tokens): "differs" if the nearest request goes on here, with other tokens;
    # otherwise "never seen", with the nearest one's name if there is one.
    if near is None:
        return Span(start, stop, "never seen")
    differs = len(near.tokens) > start
    return Span(start, stop, "differs" if differs else "never seen", near.name)
    # End of hole 3.


def merged(spans: Sequence[Span]) -> list[Span]:
    """Drop empty spans, and join neighbours with one reason and one request."""
    # Hole 4 (Spans that sum to the prompt): what is left covers the same tokens.
    joined: list[Span] = []
    for span in spans:
        if span.start >= span.stop:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.reason, last.other) == (span.reason, span.other):
            joined[-1] = replace(last, stop=span.stop)
        else:
            joined.append(span)
    return joined
    # End of hole 4.


def explain(
    prompt: Sequence[int], num_hit: int, earlier: Sequence[Earlier], tenant: str = ""
) -> list[Span]:
    """Explain each token of a prompt: it hit, or why it did not.

    Args:
        prompt: Its tokens.
        num_hit: Leading tokens that hit.
        earlier: Requests before it, oldest first; other tenants' among them.
        tenant: Whose prompt it is.
    """
    # Hole 5 (Putting it together): hits; then what the nearest request of this tenant has in
    # common; then, up to what another tenant's requests have in common, "other tenant" without a
    # name; then what is new. The last token is "last token" if all tokens before it hit, or if all
    # of the prompt is known to this tenant.
    size = len(prompt)
    near = nearest(prompt, [each for each in earlier if each.tenant == tenant])
    known = max(num_hit, 0 if near is None else num_common(prompt, near.tokens))
    spans = [Span(0, num_hit, "hit")]
    stop = min(known, size - 1)
    if near is not None:
        spans += known_spans(num_hit, max(stop, num_hit), near)
    if known >= size or num_hit == size - 1:
        return merged([*spans, Span(max(stop, num_hit), size, "last token")])
    others = [num_common(prompt, each.tokens) for each in earlier if each.tenant != tenant]
    elsewhere = max([known, *others])
    spans.append(Span(known, elsewhere, "other tenant"))
    rest = near if elsewhere == known else None
    return merged([*spans, new_span(elsewhere, size, rest)])
    # End of hole 5.
