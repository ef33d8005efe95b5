"""KV events of vLLM, SGLang and our engine, as one form."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Neighbouring full blocks became findable.

    Attributes:
        hashes: The engine's names of them, in token order.
        parent: Of the block before the first; None at the start of a prompt.
        tokens: Of all blocks, shape (num_blocks * block_size,).
        block_size: Tokens per block.
        adapter: Name; empty without one.
        extras: What images and salts add, one tuple per block, empty for none.
        medium: Where they are: ``"GPU"``, ``"CPU"``, ``"STORAGE"`` ...
        group: Which layers.
        is_window: The layers see a window only.
    """

    hashes: tuple[bytes | int, ...]
    parent: bytes | int | None
    tokens: tuple[int, ...]
    block_size: int
    adapter: str = ""
    extras: tuple[tuple[object, ...], ...] = ()
    medium: str = "GPU"
    group: int = 0
    is_window: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are gone from a medium."""

    hashes: tuple[bytes | int, ...]
    medium: str = "GPU"
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a worker.

    Attributes:
        sequence: Its number, from 0 without gaps.
        time_s: When the worker sent it, by the worker's clock.
        events: In the order in which they happened.
    """

    sequence: int
    time_s: float
    events: tuple[Stored | Removed | Cleared, ...]


class UnusableEvents(ValueError):
    """A message is no batch of KV events."""


def decode(sequence: int, payload: bytes) -> EventBatch:
    """Read a batch in vLLM's or SGLang's format, of any version.

    Raises:
        UnusableEvents: It is no such batch.
    """
    raise UnusableEvents("not yet")
