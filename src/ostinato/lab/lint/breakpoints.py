"""Checks that ``cache_control`` keeps what requests share.

Providers with explicit breakpoints cache a prompt only up to each block with ``cache_control``. A
request reads the longest such prefix that ends at one of its own breakpoints, or within 20 blocks
before it; short prefixes are not cached, and more than four breakpoints are refused.
The replay here follows these rules of Anthropic's prompt caching, and compares the
breakpoints that were sent with better ones::

    tools ─ system[0] ─ system[1] ─ messages[0] ─ messages[1]
              stable      a time ▲sent
                    ▲better
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from ostinato.lab.lint.replay import Comparison, Replayed
from ostinato.lab.lint.rewrites import Remedy
from ostinato.lab.log.request_log import LoggedRequest
from ostinato.lab.replay.explain_log import Tokenizer

MAX_BREAKPOINTS = 4
"""Maximum number of blocks with ``cache_control`` per request."""

LOOKBACK_BLOCKS = 20
"""How many blocks before a breakpoint an earlier one is still found."""

MIN_CACHED_TOKENS = 1024
"""Minimum tokens of a cached prefix; more for some models."""

_HEAD = ("tools", "system")


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt as a sequence of blocks.

    Attributes:
        fields: Request field of each block.
        chain: Digest of the prefix up to each block.
        num_tokens: Tokens up to each block.
        marks: Indices of the blocks with ``cache_control``.
    """

    fields: tuple[str, ...]
    chain: tuple[bytes, ...]
    num_tokens: tuple[int, ...]
    marks: tuple[int, ...]


def compare_breakpoints(
    requests: Sequence[LoggedRequest], tokenizer: Tokenizer
) -> Comparison | None:
    """Compare the breakpoints of a group, in order of arrival, with better ones.

    Returns:
        None for requests to an API without breakpoints.
    """
    num_tokens = cache(lambda text: len(tokenizer.encode(text)))
    rows = [_row(r, num_tokens) for r in requests if r.prompt.api == "messages"]
    if not rows:
        return None
    counts = Counter(digest for row in rows for digest in row.chain)
    sent = [row.marks for row in rows]
    better = list(_better(rows, counts))
    remedy = _remedy(rows, sent, better)
    return Comparison(remedy, len(requests), _replayed(rows, sent), _replayed(rows, better))


def _row(request: LoggedRequest, num_tokens: Callable[[str], int]) -> _Row:
    blocks = list(_blocks(request))
    digest, chain = hashlib.sha256(f"{request.model}\0{request.tenant}".encode()).digest(), []
    for _, text, _ in blocks:
        digest = hashlib.sha256(digest + text.encode()).digest()
        chain.append(digest)
    return _Row(
        tuple(field for field, _, _ in blocks),
        tuple(chain),
        tuple(accumulate(num_tokens(text) for _, text, _ in blocks)),
        tuple(place for place, (_, _, is_marked) in enumerate(blocks) if is_marked),
    )


def _blocks(request: LoggedRequest) -> Iterator[tuple[str, str, bool]]:
    """Yield the blocks of a prompt: where they were sent, their text, and whether marked."""
    prompt = request.prompt
    for place, tool in enumerate(prompt.tools):
        yield f"tools[{place}]", tool.text, tool.is_marked
    for place, message in enumerate(prompt.messages):
        if place == prompt.num_leading and prompt.settings:
            yield "settings", prompt.settings, False
        for block in message.blocks:
            yield block.field, f"<|{message.role}|>{block.written}", block.is_marked


def _better(rows: Sequence[_Row], counts: Counter[bytes]) -> Iterator[tuple[int, ...]]:
    """Yield the best breakpoints of each request: the most shared block, and the last shared one.

    What was sent before is marked as well, so that a long turn is still found.
    """
    before: set[bytes] = set()
    for row in rows:
        shared = [place for place, digest in enumerate(row.chain) if counts[digest] > 1]
        head = [p for p in shared if row.fields[p].startswith(_HEAD)]
        known = [place for place in shared if row.chain[place] in before]
        max_count = max((counts[row.chain[p]] for p in shared), default=0)
        common = [place for place in shared if counts[row.chain[place]] == max_count]
        ends = (places[-1] for places in (shared, known, head, common) if places)
        yield tuple(sorted(set(ends)))
        before.update(row.chain)


def _replayed(rows: Sequence[_Row], marks: Iterable[tuple[int, ...]]) -> Replayed:
    """Replay requests on a cache with breakpoints."""
    cached: set[bytes] = set()
    prompt_tokens = computed = 0
    for row, row_marks in zip(rows, marks, strict=True):
        total = row.num_tokens[-1] if row.num_tokens else 0
        prompt_tokens += total
        computed += total
        if len(row_marks) > MAX_BREAKPOINTS:
            continue  # refused, so nothing is cached
        usable = [place for place in row_marks if row.num_tokens[place] >= MIN_CACHED_TOKENS]
        computed -= max((_read(row, place, cached) for place in usable), default=0)
        cached.update(row.chain[place] for place in usable)
    return Replayed(prompt_tokens, computed)


def _read(row: _Row, mark: int, cached: set[bytes]) -> int:
    """Return the tokens read from the cache at a breakpoint."""
    places = range(mark, max(-1, mark - LOOKBACK_BLOCKS), -1)
    return next((row.num_tokens[place] for place in places if row.chain[place] in cached), 0)


def _remedy(
    rows: Sequence[_Row], sent: Sequence[tuple[int, ...]], better: Sequence[tuple[int, ...]]
) -> Remedy:
    """Describe what is wrong with the breakpoints that were sent."""
    num_marks = max(map(len, sent))
    target = " and ".join(_targets(rows, better)) or "the last block that stays the same"
    used = dict.fromkeys(
        row.fields[p] for row, row_marks in zip(rows, sent, strict=True) for p in row_marks
    )
    if num_marks > MAX_BREAKPOINTS:
        advice = (
            f"A request may have {MAX_BREAKPOINTS} cache_control blocks and has {num_marks}, so "
            f"it is refused. Keep those on {target}."
        )
    elif not num_marks:
        advice = (
            f"Add cache_control to {target}. Without it, Anthropic's API caches nothing "
            "(servers that cache prefixes by themselves do not need it)."
        )
    else:
        advice = (
            f"Put cache_control on {target}. The prefix up to it must be the same in the next "
            "request, so no block that changes may be before it or carry it."
        )
    return Remedy("cache_control", advice, None, target, tuple(used)[:3])


def _targets(rows: Sequence[_Row], better: Sequence[tuple[int, ...]]) -> list[str]:
    """Name the blocks that should have breakpoints; in a conversation, its end."""
    fields = [[row.fields[p] for p in places] for row, places in zip(rows, better, strict=True)]
    named = dict.fromkeys(field for row_fields in fields for field in row_fields)
    fixed = [field for field in named if field.startswith(_HEAD)]
    moving = [field for field in named if not field.startswith(_HEAD)]
    # A system prompt that was sent as a string has no place for ``cache_control``.
    shown = [f"{field} (as a text block)" if field == "system" else field for field in fixed]
    if len(moving) > 1:
        return [*shown, "the last block of each request"]
    return [*shown, *moving]
