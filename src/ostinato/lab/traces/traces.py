"""Reads traces of traffic of any kind.

=================  ==============================================================
file               what it is
=================  ==============================================================
``*.npz``          arrays ``ts_ms, input_len, output_len, offsets, ids``; blocks of 512 tokens
JSONL of hashes    ``hash_ids`` instead of tokens: Mooncake's, Bailian's; see ``hash_traces``
recorded trace     what ``record_trace`` wrote: see ``ostinato.traces``; blocks as asked
JSONL of requests  as clients send them, with a tokenizer: see ``request_log``; blocks as asked
=================  ==============================================================

All become a ``BlockTrace``; JSON lines may be packed as ``.gz``.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from ostinato.errors import BrokenTrace, ConfigError
from ostinato.lab.log.lines import BrokenLine, OnBroken, iter_lines, read_object
from ostinato.lab.log.request_log import LoggedRequest, LogOptions, filled_times, iter_converted
from ostinato.lab.traces.block_trace import BlockRequest, BlockTrace
from ostinato.lab.traces.hash_traces import TimeUnit, read_hash_trace
from ostinato.lab.traces.recording import read_recording
from ostinato.lab.traces.trace_builder import TraceBuilder
from ostinato.traces.anonymizer import unpack_names

_ARRAYS_BLOCK = 512
"""Tokens per block of traces as arrays."""

_ARRAYS = ("ts_ms", "input_len", "output_len", "offsets", "ids")

_LINES_TRIED = 1000
"""The first of these lines that can be read says what a file is; those before it may be torn."""

Kind = Literal["arrays", "hashes", "recording", "requests"]
"""What a file is."""

Tokenizer = Callable[[Mapping[str, Any]], Sequence[int]]
"""Turns a request's body, with its ``prompt`` or ``messages`` and ``tools``, into token ids."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        block_tokens: Tokens per block. None is that of the recorded engine, 16 for logs, and
            derived from the lengths where a trace lists hashes.
        on_broken: Whether to stop at an invalid line, or to skip it.
        tokenizer: For logs of requests.
        unit: Unit of the timestamps of a trace of hashes; ``auto`` derives it.
    """

    block_tokens: int | None = None
    on_broken: OnBroken = "refuse"
    tokenizer: Tokenizer | None = None
    unit: TimeUnit = "auto"


def read_trace(path: str | Path, options: ReadOptions | None = None) -> BlockTrace:
    """Read a trace of any known kind; what it is shows in the file.

    Raises:
        BrokenTrace: It cannot be read, or a line cannot and is not to be left out.
        ConfigError: It is a log of requests, and there is no tokenizer; or other blocks are asked
            for than a public trace has.
    """
    path, options = Path(path), options or ReadOptions()
    kind, size = kind_of(path), options.block_tokens
    if kind == "arrays":
        if size not in (None, _ARRAYS_BLOCK):
            raise ConfigError(
                f"block_size={size}: {path.name} lists blocks of {_ARRAYS_BLOCK} tokens and no "
                "tokens; leave --block-size out"
            )
        return read_npz(path)
    if kind == "hashes":
        return read_hash_trace(path, size, options.on_broken, options.unit)
    if kind == "recording":
        return read_recorded(path, size, options.on_broken)
    return read_openai(path, options)


def is_recording(path: str | Path) -> bool:
    """Whether a file is what an engine recorded."""
    return kind_of(path) == "recording"


def kind_of(path: str | Path) -> Kind:
    """Say what a file is, by the first line that can be read.

    Raises:
        BrokenTrace: There is no such file, or none of its first lines is a JSON object.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return "arrays"
    fields = _first_object(path)
    if "hash_ids" in fields or "input_length" in fields:
        return "hashes"
    return "recording" if isinstance(fields.get("event"), str) else "requests"


def read_npz(path: Path) -> BlockTrace:
    """Read a trace of arrays.

    Raises:
        BrokenTrace: An array is missing, or they contradict each other.
    """
    ts_ms, inputs, outputs, offsets, ids = _arrays(path)
    is_whole = len(offsets) == len(ts_ms) + 1 == len(inputs) + 1 == len(outputs) + 1
    if not is_whole or offsets[0] or len(ids) != offsets[-1] or (np.diff(offsets) < 0).any():
        raise BrokenTrace(f"{path.name}: its arrays do not fit together")
    if (ids < 0).any():
        raise BrokenTrace(f"{path.name}: ids has {ids.min()}, and ids are at least 0")
    requests = (
        BlockRequest(
            float(ts_ms[i]),
            int(inputs[i]),
            int(outputs[i]),
            ids[offsets[i] : offsets[i + 1]].tolist(),
        )
        for i in np.argsort(ts_ms, kind="stable")
    )
    try:
        builder = TraceBuilder(requests)
    except BrokenTrace as error:
        raise BrokenTrace(f"{path.name}: {error}") from error
    return builder.build(path.name, _ARRAYS_BLOCK, units_per_s=1000)


def _arrays(path: Path) -> Iterator[Any]:
    """Read the five arrays, as rows of whole numbers.

    Raises:
        BrokenTrace: One is missing, or is no such row.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = [file[name] for name in _ARRAYS]
    except FileNotFoundError as error:
        raise BrokenTrace(f"{path}: {error.strerror}") from error
    except (
        OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error
    ) as error:  # fmt: skip
        raise BrokenTrace(f"{path.name} is no trace of arrays: {error}") from error
    for name, row in zip(_ARRAYS, arrays, strict=True):
        if row.ndim != 1 or row.dtype.kind not in "iuf" or not np.isfinite(row).all():
            raise BrokenTrace(f"{path.name}: {name} must be a row of whole numbers")
        yield row.astype(np.int64)


def read_recorded(
    path: Path, block_tokens: int | None = None, on_broken: OnBroken = "refuse"
) -> BlockTrace:
    """Read what an engine recorded, in blocks; answers are blocks as well, for a next turn.

    Tenants share nothing: a block's name holds its tenant's.
    """
    recording = read_recording(path, on_broken)
    size = block_tokens or recording.header.cache.block_size
    ended = recording.ended
    builder = TraceBuilder()
    for added in recording.added:
        prompt = unpack_names(added.prompt)
        end = ended.get(added.request)
        outputs = () if end is None else end.sequences
        # The last token of an answer is never computed, so it is in no block.
        answer = unpack_names(outputs[0].output)[:-1] if outputs else prompt[:0]
        tokens = prompt + answer
        blocks = _blocks(tokens.tolist(), size, (added.tenant, added.epoch))
        builder.add(
            BlockRequest(
                added.arrival_us / 1_000_000,
                len(prompt),
                sum(len(output.output) // 4 for output in outputs),
                blocks,
                len(blocks) - len(prompt) // size,
            )
        )
    trace = builder.build(path.name, size, recording.broken)
    token_bytes = recording.header.model.get("token_bytes")
    return replace(trace, token_bytes=token_bytes if isinstance(token_bytes, int) else None)


def read_openai(path: Path, options: ReadOptions) -> BlockTrace:
    """Read a log of requests as OpenAI's clients send them: see ``request_log``.

    Without a time, a request comes a second after the one before; an answer that was not written
    down counts as ``max_tokens``, since nothing else is known of it.

    Raises:
        ConfigError: There is no tokenizer.
        BrokenTrace: A line is invalid, and not to be skipped.
    """
    tokenizer, size = options.tokenizer, options.block_tokens or 16
    if tokenizer is None:
        raise ConfigError(f"{path.name} is a log of requests: give a model, for its tokenizer")

    def convert(logged: LoggedRequest) -> tuple[float | None, BlockRequest]:
        tokens = _tokenize(tokenizer, logged.body)
        # What was not written down may have been as long as the limit.
        num_answer_tokens = logged.max_output_tokens or 1
        if logged.answer:
            num_answer_tokens = len(_tokenize(tokenizer, {"prompt": logged.answer}))
        blocks = _blocks(tokens, size, (logged.tenant, logged.model))
        request = BlockRequest(logged.at_s or 0.0, len(tokens), num_answer_tokens, blocks)
        return logged.at_s, request

    log = LogOptions(options.on_broken)
    builder, times = TraceBuilder(), list[float | None]()
    for at_s, request in iter_converted(path, log, convert):
        times.append(at_s)
        builder.add(request)
    builder.arrivals[:] = array("d", filled_times(times))
    return builder.build(path.name, size, tuple(log.broken))


def _blocks(tokens: list[int], size: int, owner: tuple[object, ...]) -> tuple[object, ...]:
    """Return the full blocks of a row of tokens; the first one's name holds the owner's."""
    full = len(tokens) // size
    blocks: list[object] = [tuple(tokens[i * size : (i + 1) * size]) for i in range(full)]
    if blocks:
        blocks[0] = (owner, blocks[0])
    return tuple(blocks)


def _tokenize(tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
    try:
        tokens = list(tokenizer(body))
    except Exception as error:  # templates are programs of their own, and refuse as they like
        raise BrokenTrace(f"the prompt cannot be tokenized: {error}") from error
    if not tokens:
        raise BrokenTrace("the prompt has no tokens")
    return tokens


def _first_object(path: Path) -> dict[str, Any]:
    """Return the first line that is a JSON object.

    Raises:
        BrokenTrace: The file cannot be read, or there is none among its first lines.
    """

    def parse(number: int, line: bytes) -> dict[str, Any]:
        if number > _LINES_TRIED:
            raise _Undecided
        return read_object(line)

    broken: list[BrokenLine] = []
    try:
        return next(iter_lines(path, parse, "skip", broken))
    except (BrokenTrace, _Undecided) as error:
        if not broken:
            raise
        raise BrokenTrace(
            f"{path.name} is neither a trace nor a log of requests: in none of its first lines is "
            f"a JSON object ({broken[0].reason})"
        ) from error


class _Undecided(Exception):
    """None of the first lines says what a file is."""
