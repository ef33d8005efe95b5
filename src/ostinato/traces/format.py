"""The format of traces.

A trace is text, a JSON object per line: a header, then events in the order in which they happened.
A replay on the same scheduler and cache gives the same hits, request by request::

    {"event":"header", "version":2, "cache":{...}, "scheduler":{...}, "model":{...}, ...}
    {"event":"added",  "step":0, "at_us":12, "request":0, "prompt":"...", ...}
    {"event":"steps",  "step":0, "times_us":[40, 900, 950, 1400]}      two steps: begun, ended
    {"event":"ended",  "step":2, "at_us":1400, "request":0, "cached":0, "sequences":[...]}

Tokens are pseudonyms, see ``anonymizer``.
"""

from typing import Any

import msgspec

from ostinato.core.config import SchedulerConfig
from ostinato.errors import BrokenTrace
from ostinato.settings import PrefixCacheConfig

VERSION = 2
"""Of the format; a reader refuses what is newer. 1 had ``policy`` for ``eviction_policy``."""


class TraceHeader(msgspec.Struct, frozen=True, tag_field="event", tag="header", kw_only=True):
    """The first line.

    Attributes:
        version: Version of the format.
        cache: Settings of the cache; tenants of ``tenant_shares`` are pseudonyms.
        scheduler: Settings of the scheduler.
        model: The model's shape: what its tokens weigh, not what they say.
        is_cold: Whether nothing was cached or running when the recording began; only then
            a replay gives the same hits from the first request on.
        epoch: Epoch of the weights at the beginning.
        start_us: The engine's clock at the beginning, in microseconds.
        unix_s: Time of day at the beginning, in seconds since 1970.
    """

    version: int
    cache: PrefixCacheConfig
    scheduler: SchedulerConfig
    model: dict[str, Any]
    is_cold: bool
    epoch: int
    start_us: int
    unix_s: float


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    """Something that happened.

    Attributes:
        step: Steps that had run before it; an event between two steps has the number of the
            second.
    """

    step: int


class TimedEvent(Event, frozen=True):
    """Something that happened at a time.

    Attributes:
        at_us: Microseconds since ``start_us``.
    """

    at_us: int


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image's place among the tokens, with a pseudonym for its content."""

    name: str
    start: int
    length: int


class Added(TimedEvent, frozen=True):
    """A request was added.

    Attributes:
        request: Its number, from 0 on.
        arrival_us: When it reached the engine.
        prompt: Pseudonyms, little-endian ``uint32``, shape (num_prompt_tokens * 4,).
        tenant: A pseudonym of its salt; empty without one.
        adapter: A pseudonym of its adapter; empty without one.
        head: A pseudonym of the public prefix that it begins with, and its length in tokens;
            None without one.
        epoch: Epoch of the weights, when it was made.
        images: Among its tokens.
        n: Continuations.
        max_tokens: Most tokens of each; None is no limit of its own.
        priority: Lower goes first.
        cache_read: Whether it may hit.
        cache_write: Whether others may hit what it computes.
        prompt_logprobs: Whether it needs logits of its prompt.
        adapter_start: First token that the adapter computes.
        prompt_logprob_start: First prompt token whose log-probability it needs; the hit ends before
            the token that precedes it.
    """

    request: int
    arrival_us: int
    prompt: bytes
    tenant: str = ""
    adapter: str = ""
    head: tuple[str, int] | None = None
    epoch: int = 0
    images: tuple[Image, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    priority: int = 0
    cache_read: bool = True
    cache_write: bool = True
    prompt_logprobs: bool = False
    adapter_start: int = 0
    prompt_logprob_start: int = 1


class Steps(Event, frozen=True):
    """Steps that ran, from ``step`` on.

    Attributes:
        times_us: For each, when it was planned and when its result was committed.
    """

    times_us: tuple[int, ...]


class Failed(Event, frozen=True):
    """A step whose forward pass raised, with the times of its plan and of its end."""

    times_us: tuple[int, int]


class SequenceEnd(msgspec.Struct, frozen=True):
    """How one continuation ended.

    Attributes:
        output: Pseudonyms, little-endian ``uint32``, shape (num_output_tokens * 4,).
        reason: As ``FinishReason`` spells it; ``live`` if it went on after the recording.
        by_string: Whether a stop string ended it, after the step.
    """

    output: bytes
    reason: str
    by_string: bool = False


class Ended(TimedEvent, frozen=True):
    """All continuations of a request have ended, with what hit.

    Attributes:
        request: Its number.
        cached: Prompt tokens that hit at its first admission, copied ones included.
        copied: Those of them that were copied out of a block.
        was_admitted: Whether it was ever admitted; if not, nothing was looked up.
        sequences: In the order of their index; fewer than ``n`` if it ended before it was forked.
    """

    request: int
    cached: int
    copied: int
    was_admitted: bool
    sequences: tuple[SequenceEnd, ...]


class Cancelled(TimedEvent, frozen=True):
    """A request was cancelled between steps."""

    request: int


class CacheReset(TimedEvent, frozen=True):
    """The cache was reset; running requests were preempted first, if there were any."""

    preempted: bool


class NewEpoch(TimedEvent, frozen=True):
    """The weights were changed."""


class Erased(TimedEvent, frozen=True):
    """A tenant's blocks were erased."""

    tenant: str


class Leased(TimedEvent, frozen=True):
    """A lease of a prefix was requested.

    Attributes:
        lease: Number of the lease; None if nothing was held.
        prefix: As in ``Added.prompt``.
        tenant: A pseudonym; empty without a salt.
        head: As in ``Added``.
        ttl_s: Seconds; None pins it.
        refresh_on_hit: Whether each use restarts its time.
    """

    lease: int | None
    prefix: bytes
    tenant: str = ""
    head: tuple[str, int] | None = None
    ttl_s: float | None = None
    refresh_on_hit: bool = False


class Published(TimedEvent, frozen=True):
    """Publication of a prefix was requested; attributes as in ``Leased``."""

    prefix: bytes
    tenant: str
    head: None = None


class LeaseEnded(TimedEvent, frozen=True):
    """A lease ended."""

    lease: int


class Stopped(TimedEvent, frozen=True):
    """The recording was stopped; a trace without this line was cut off."""


AnyEvent = (
    Added
    | Steps
    | Failed
    | Ended
    | Cancelled
    | CacheReset
    | NewEpoch
    | Erased
    | Leased
    | Published
    | LeaseEnded
    | Stopped
)

_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(TraceHeader)
_events: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyEvent)


def write_line(line: TraceHeader | AnyEvent) -> bytes:
    """Return one line of a trace, with its line break."""
    return _encoder.encode(line) + b"\n"


def read_header(line: bytes) -> TraceHeader:
    """Read the first line.

    Raises:
        BrokenTrace: It is no header, or of a newer version.
    """
    try:
        header = _headers.decode(_present_names(line))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenTrace(f"this is no header of a recorded trace: {error}") from error
    if header.version > VERSION:
        raise BrokenTrace(
            f"the trace has version {header.version} and this Ostinato reads up to {VERSION}: "
            "use a newer one"
        )
    return header


def _present_names(line: bytes) -> bytes:
    """Return a header with the settings' present names."""
    match header := msgspec.json.decode(line):
        case {"version": 1, "cache": {"policy": policy, **others}}:
            header["cache"] = {"eviction_policy": policy, **others}
    return msgspec.json.encode(header)


def read_event(line: bytes) -> AnyEvent:
    """Read any other line.

    Raises:
        BrokenTrace: It is no event.
    """
    try:
        event: AnyEvent = _events.decode(line)
        return event
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenTrace(f"this is no event of a recorded trace: {error}") from error
