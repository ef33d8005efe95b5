"""How are traces of traffic read, whoever wrote them?

=================  ==============================================================
file               what it is
=================  ==============================================================
``*.npz``          arrays ``ts_ms, input_len, output_len, offsets, ids``; blocks of 512 tokens
Mooncake JSONL     ``timestamp, input_length, output_length, hash_ids``; blocks of 512 tokens
recorded trace     what ``record_trace`` wrote: see ``core.trace``; blocks as asked
OpenAI JSONL       requests as clients send them, with a tokenizer; blocks as asked
=================  ==============================================================

All become a ``BlockTrace``. Sources: Mooncake's open traces (arXiv 2407.00079); the request
bodies of OpenAI's chat completions and completions, alone or as the ``body`` of a batch line.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from ostinato.core.errors import BrokenTrace, ConfigError
from ostinato.lab.block_trace import BlockRequest, BlockTrace, make_block_trace
from ostinato.lab.lines import OnBroken, read_lines
from ostinato.lab.recording import read_recording
from ostinato.lab.request_log import LoggedRequest, filled_times, parse_request
from ostinato.traces.anonymizer import unpack_names

PUBLIC_BLOCK_TOKENS = 512
"""Tokens per block of the public traces."""

_ARRAYS = ("ts_ms", "input_len", "output_len", "offsets", "ids")

_LINES_TRIED = 1000
"""Lines in which the first that can be read says what a file is; one above may be torn."""

_SHOWN_LETTERS = 40

Kind = Literal["arrays", "mooncake", "recording", "requests"]
"""What a file is."""

Tokenizer = Callable[[Mapping[str, Any]], Sequence[int]]
"""Turns a request's body, with its ``prompt`` or ``messages`` and ``tools``, into token ids."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        block_tokens: Tokens per block, where the trace has tokens; public traces bring theirs.
            None is that of the recorded engine, and 16 for logs.
        on_broken: Whether a line that cannot be read ends the reading or is left out.
        tokenizer: For logs of requests.
    """

    block_tokens: int | None = None
    on_broken: OnBroken = "refuse"
    tokenizer: Tokenizer | None = None


def read_trace(path: str | Path, options: ReadOptions | None = None) -> BlockTrace:
    """Read a trace of any known kind; what it is shows in the file.

    Raises:
        BrokenTrace: It cannot be read, or a line cannot and is not to be left out.
        ConfigError: It is a log of requests, and there is no tokenizer; or other blocks are asked
            for than a public trace has.
    """
    path, options = Path(path), options or ReadOptions()
    kind, size = kind_of(path), options.block_tokens
    if kind in ("arrays", "mooncake") and size not in (None, PUBLIC_BLOCK_TOKENS):
        raise ConfigError(
            f"block_size={size}: {path.name} lists blocks of {PUBLIC_BLOCK_TOKENS} tokens and no "
            "tokens; leave --block-size out"
        )
    if kind == "arrays":
        return read_npz(path)
    if kind == "mooncake":
        return read_mooncake(path, options.on_broken)
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
        return "mooncake"
    return "recording" if isinstance(fields.get("event"), str) else "requests"


def read_npz(path: Path) -> BlockTrace:
    """Read a trace of arrays.

    Raises:
        BrokenTrace: An array is missing, or they contradict each other.
    """
    ts_ms, lengths, outputs, offsets, ids = _arrays(path)
    is_whole = len(offsets) == len(ts_ms) + 1 == len(lengths) + 1 == len(outputs) + 1
    if not is_whole or offsets[0] or len(ids) != offsets[-1] or (np.diff(offsets) < 0).any():
        raise BrokenTrace(f"{path.name}: its arrays do not fit together")
    if (ids < 0).any():
        raise BrokenTrace(f"{path.name}: ids has {ids.min()}, and ids are at least 0")
    order = np.argsort(ts_ms, kind="stable")
    rows = ids.tolist()
    try:
        requests = [
            BlockRequest(
                float(ts_ms[i]) / 1000,
                int(lengths[i]),
                int(outputs[i]),
                tuple(rows[offsets[i] : offsets[i + 1]]),
            )
            for i in order
        ]
    except BrokenTrace as error:
        raise BrokenTrace(f"{path.name}: {error}") from error
    return make_block_trace(path.name, PUBLIC_BLOCK_TOKENS, requests)


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
    for name, array in zip(_ARRAYS, arrays, strict=True):
        if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise BrokenTrace(f"{path.name}: {name} must be a row of whole numbers")
        yield array.astype(np.int64)


def read_mooncake(path: Path, on_broken: OnBroken = "refuse") -> BlockTrace:
    """Read one of Mooncake's traces; the partial last block of a prompt is left out.

    Raises:
        BrokenTrace: A line cannot be read and is not to be left out.
    """

    def parse(line: bytes) -> BlockRequest:
        fields = _object(line)
        input_tokens, output_tokens = (_count(fields, f"{x}_length") for x in ("input", "output"))
        ids = fields.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise BrokenTrace("hash_ids must be a list of integers of at least 0")
        full = input_tokens // PUBLIC_BLOCK_TOKENS
        if not full <= len(ids) <= full + 1:
            raise BrokenTrace(
                f"{len(ids)} hash_ids for {input_tokens} tokens in blocks of {PUBLIC_BLOCK_TOKENS}"
            )
        arrival_s = _count(fields, "timestamp") / 1000
        return BlockRequest(arrival_s, input_tokens, output_tokens, tuple(ids[:full]))

    lines = read_lines(path, parse, on_broken)
    return make_block_trace(path.name, PUBLIC_BLOCK_TOKENS, lines.items, lines.broken)


def read_recorded(
    path: Path, block_tokens: int | None = None, on_broken: OnBroken = "refuse"
) -> BlockTrace:
    """Read what an engine recorded, in blocks; answers are blocks as well, for a next turn.

    Tenants share nothing: a block's name holds its tenant's.
    """
    recording = read_recording(path, on_broken)
    size = block_tokens or recording.header.cache.block_size
    ended = recording.ended
    requests = []
    for added in recording.added:
        prompt = unpack_names(added.prompt)
        end = ended.get(added.request)
        outputs = () if end is None else end.sequences
        # The last token of an answer is never computed, so it is in no block.
        answer = unpack_names(outputs[0].output)[:-1] if outputs else prompt[:0]
        tokens = prompt + answer
        blocks = _blocks(tokens.tolist(), size, (added.tenant, added.epoch))
        requests.append(
            BlockRequest(
                added.arrival_us / 1_000_000,
                len(prompt),
                sum(len(output.output) // 4 for output in outputs),
                blocks,
                len(blocks) - len(prompt) // size,
            )
        )
    trace = make_block_trace(path.name, size, requests, recording.broken)
    token_bytes = recording.header.model.get("token_bytes")
    return replace(trace, token_bytes=token_bytes if isinstance(token_bytes, int) else None)


def read_openai(path: Path, options: ReadOptions) -> BlockTrace:
    """Read a log of requests as OpenAI's clients send them: see ``request_log``.

    Without a time, a request comes a second after the one before; an answer that was not written
    down counts as ``max_tokens``, since nothing else is known of it.

    Raises:
        ConfigError: There is no tokenizer.
        BrokenTrace: A line cannot be read and is not to be left out.
    """
    tokenizer, size = options.tokenizer, options.block_tokens or 16
    if tokenizer is None:
        raise ConfigError(f"{path.name} is a log of requests: give a model, for its tokenizer")
    numbers = count(1)

    def parse(line: bytes) -> tuple[float | None, BlockRequest]:
        logged = parse_request(line, next(numbers))
        tokens = _tokenize(tokenizer, logged.body)
        answer = _answer_tokens(tokenizer, logged)
        blocks = _blocks(tokens, size, (logged.tenant,))
        return logged.at_s, BlockRequest(logged.at_s or 0.0, len(tokens), answer, blocks)

    lines = read_lines(path, parse, options.on_broken)
    times = filled_times([at_s for at_s, _ in lines.items])
    requests = (
        replace(request, arrival_s=at_s)
        for at_s, (_, request) in zip(times, lines.items, strict=True)
    )
    return make_block_trace(path.name, size, requests, lines.broken)


def _answer_tokens(tokenizer: Tokenizer, logged: LoggedRequest) -> int:
    """Say how long the answer was, or may have been."""
    if logged.answer:
        return len(_tokenize(tokenizer, {"prompt": logged.answer}))
    most = logged.body.get("max_completion_tokens") or logged.body.get("max_tokens") or 1
    return int(most) if _is_number(most) else 1


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
    try:
        with path.open("rb") as file:
            first = None
            for line in islice((line for line in file if line.strip()), _LINES_TRIED):
                try:
                    return _object(line)
                except (BrokenTrace, RecursionError) as error:
                    first = first or error
    except OSError as error:
        raise BrokenTrace(f"{path}: {error.strerror or error}") from error
    if first is None:
        raise BrokenTrace(f"{path.name}: it is empty")
    raise BrokenTrace(
        f"{path.name} is neither a trace nor a log of requests: in none of its first lines is a "
        f"JSON object ({first})"
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BrokenTrace(f"this is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BrokenTrace(f"this is {type(fields).__name__}, not an object")
    return fields


def _count(fields: dict[str, Any], name: str) -> int:
    value: Any = fields.get(name)
    if not _is_number(value) or not 0 <= value < 2**53:
        shown = repr(value)[:_SHOWN_LETTERS]
        raise BrokenTrace(f"{name}={shown}: must be a number of at least 0")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
