"""Reads public traces, which list hashes of blocks instead of tokens.

JSON lines with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, as Mooncake
publishes them (blocks of 512 tokens, milliseconds) and Alibaba's Bailian (blocks of 16, seconds)::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, ...]}

Neither states its block size or its unit of time, so both are derived from the first lines. A
prompt of 1,100 tokens with 3 hashes has blocks of 276 to 549 tokens; the power of two that fits
most prompts is chosen. Times with fractions are seconds; for whole ones the unit is chosen that
gives less than 200 requests per second.

Sources: Mooncake, arXiv 2407.00079; "KVCache Cache in the Wild", arXiv 2506.02634.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ostinato.errors import BrokenTrace, ConfigError
from ostinato.lab.log.lines import BrokenLine, OnBroken, iter_lines, read_object
from ostinato.lab.traces.block_trace import BlockRequest, BlockTrace
from ostinato.lab.traces.trace_builder import TraceBuilder

TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
"""Unit of a trace's timestamps."""

UNITS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}

_SIZES: tuple[int, ...] = (512, 16, *(2**power for power in range(15) if power not in (4, 9)))
"""Candidate block sizes; the first of equally likely ones wins."""

_SAMPLE = 1000
"""Number of lines from which block size and unit are derived."""

_MAX_RATE = 200.0
"""Requests per second, above which whole timestamps are not milliseconds."""

_EPOCHS = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8))
"""Smallest timestamps since 1970, by unit."""

_SHOWN_LETTERS = 40


def read_hash_trace(
    path: Path,
    block_tokens: int | None = None,
    on_broken: OnBroken = "refuse",
    unit: TimeUnit = "auto",
) -> BlockTrace:
    """Read a trace of block hashes; the partial last block of a prompt is left out.

    The block size is derived if ``block_tokens`` is None, and so is the unit of time if ``auto``.

    Raises:
        BrokenTrace: A line is invalid, and not to be skipped.
        ConfigError: The block size cannot be derived, or contradicts the lengths.

    Cost: 4 bytes of memory per hash, and 8 to 16 per distinct one.
    """
    sample = list(islice(iter_lines(path, _parse, "skip", []), _SAMPLE))
    size = _block_size(path.name, sample, block_tokens)
    if unit == "auto":
        unit = _time_unit([row.arrival_s for row in sample])

    def parse(number: int, line: bytes) -> BlockRequest:
        return _in_full_blocks(_parse(number, line), size)

    broken = list[BrokenLine]()
    builder = TraceBuilder(iter_lines(path, parse, on_broken, broken))
    trace = builder.build(path.name, size, tuple(broken), UNITS_PER_S[unit])
    return replace(trace, notes=(f"Timestamps are read as {_UNIT_NAMES[unit]}.",))


def _parse(_number: int, line: bytes) -> BlockRequest:
    """Read a line: its arrival in the trace's own unit, and all of its hashes."""
    fields = read_object(line)
    hashes = fields.get("hash_ids")
    if not isinstance(hashes, list) or not {type(each) for each in hashes} <= {int, str}:
        raise BrokenTrace("hash_ids must be a list of integers or strings")
    num_input, num_output = int(_figure(fields, "input_length")), _figure(fields, "output_length")
    return BlockRequest(_figure(fields, "timestamp"), num_input, int(num_output), hashes)


def _figure(fields: dict[str, Any], name: str) -> float:
    value: object = fields.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 2**63:
        shown = repr(value)[:_SHOWN_LETTERS]
        raise BrokenTrace(f"{name}={shown}: must be a number of at least 0")
    return value


def _in_full_blocks(row: BlockRequest, block_tokens: int) -> BlockRequest:
    """Return a line's request, without its partial last block."""
    if not _fits(row, block_tokens):
        raise BrokenTrace(
            f"{len(row.blocks)} hash_ids for {row.input_tokens} tokens in blocks of {block_tokens}"
        )
    return replace(row, blocks=row.blocks[: row.input_tokens // block_tokens])


def _fits(row: BlockRequest, block_tokens: int) -> bool:
    """Return whether a prompt has as many hashes as blocks, with or without the partial last."""
    full = row.input_tokens // block_tokens
    return full <= len(row.blocks) <= -(-row.input_tokens // block_tokens)


def _block_size(name: str, rows: Sequence[BlockRequest], requested: int | None) -> int:
    """Derive the tokens per block from lengths and numbers of hashes.

    Raises:
        ConfigError: No power of two fits, or the requested size contradicts the lengths.
    """
    votes = {size: sum(_fits(row, size) for row in rows) for size in _SIZES}
    likely = max(_SIZES, key=lambda size: votes[size])
    if requested is not None:
        if 2 * sum(_fits(row, requested) for row in rows) < len(rows):
            raise ConfigError(
                f"block_size={requested}: {name} lists blocks of {likely} tokens, by the lengths "
                "of its prompts; do not give --block-size"
            )
        return requested
    if 2 * votes[likely] < len(rows):
        raise ConfigError(
            f"{name}: its block size is not a power of two, by the lengths of its prompts and "
            "their numbers of hash_ids; give --block-size"
        )
    return likely


def _time_unit(times: Sequence[float]) -> TimeUnit:
    """Return the unit of the timestamps."""
    span, largest = max(times) - min(times), max(times)
    for unit, min_time in _EPOCHS:
        if largest >= min_time:
            return unit  # type: ignore[return-value]  # the names are those of TimeUnit
    if any(time % 1 for time in times):
        return "s"
    rate_in_ms = len(times) / span * 1000 if span else 0.0
    return "s" if rate_in_ms > _MAX_RATE else "ms"


_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
