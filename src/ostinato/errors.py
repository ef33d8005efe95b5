"""The tree of exceptions; those that the heart raises are defined in ``core.errors``.

Catch as much or as little of it as you want::

    OstinatoError
    ├── ConfigError (ValueError)      a setting is out of range, or two contradict each other
    ├── ModelError                    the model cannot be served
    │   ├── ModelNotFound             no such directory, embedded model or hub name
    │   ├── BrokenCheckpoint          files are missing, truncated or do not fit the config
    │   ├── MissingTokenizer          text was given, but the checkpoint has no tokenizer
    │   └── UnsupportedModel          it would load, but we could not serve it correctly
    ├── RequestError (ValueError)     this one request is refused; others are not affected
    │   ├── EmptyPrompt
    │   ├── InvalidIdentity
    │   ├── TokenOutOfRange
    │   ├── PromptTooLong
    │   ├── InvalidSamplingParams
    │   └── DuplicateRequest
    ├── CacheInUse                    a reset was requested while requests hold blocks
    ├── CacheMisuse                   the cache was called in a wrong order; nothing changed
    │   ├── ReleasedTable             the table is not live, or it is another cache's
    │   ├── StaleMatch                the match is another key's, or the cache has changed since
    │   ├── StepInProgress            blocks are published and neither committed nor failed
    │   ├── TableOverrun              more tokens than the table or its sequence has
    │   └── WrongThread               another thread's tables are live
    ├── BrokenTrace (ValueError)      a recorded or given trace of requests cannot be read
    ├── UnsupportedCall (AttributeError)  a method that vLLM has and this engine does not
    └── EngineError
        ├── StepFailed                the forward pass of a step raised; its requests ended
        ├── ConcurrentCall            another thread is using this LLM
        └── EngineStopped             the engine was shut down
            └── ForkedProcess         it runs in the process that this one was forked from

Every message names the value, the limit and the setting to change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ostinato.core.errors import (
    CacheMisuse,
    ConfigError,
    DuplicateRequest,
    EmptyPrompt,
    InvalidIdentity,
    OstinatoError,
    PromptTooLong,
    ReleasedTable,
    RequestError,
    StaleMatch,
    StepInProgress,
    TableOverrun,
    TokenOutOfRange,
    WrongThread,
)

__all__ = [
    "BrokenCheckpoint", "BrokenTrace", "CacheInUse", "CacheMisuse", "ConcurrentCall", "ConfigError",
    "DuplicateRequest", "EmptyPrompt", "EngineError", "EngineStopped", "ForkedProcess",
    "InvalidIdentity", "InvalidSamplingParams", "MissingTokenizer", "ModelError", "ModelNotFound",
    "OstinatoError", "PromptTooLong", "ReleasedTable", "RequestError", "StaleMatch", "StepFailed",
    "StepInProgress", "TableOverrun", "TokenOutOfRange", "UnsupportedCall", "UnsupportedModel",
    "WrongThread", "naming",
]  # fmt: skip


class ModelError(OstinatoError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """No directory, embedded model or hub repository of that name."""


class BrokenCheckpoint(ModelError):
    """The checkpoint's files are missing, truncated or do not fit its config."""


class MissingTokenizer(ModelError):
    """Text was given or requested, but the checkpoint has no tokenizer."""


class UnsupportedModel(ModelError):
    """The model would load, but could not be served correctly."""


class InvalidSamplingParams(RequestError):
    """A sampling parameter is out of range."""


class CacheInUse(OstinatoError):
    """A reset was requested while requests hold blocks."""


class BrokenTrace(OstinatoError, ValueError):
    """A trace of requests cannot be read; the message names the line."""


class UnsupportedCall(OstinatoError, AttributeError):
    """A method of vLLM that this engine does not have; the message says what to use instead.

    As an ``AttributeError`` it lets ``hasattr`` return False.
    """


class EngineError(OstinatoError):
    """The engine could not continue a step or a request."""


class StepFailed(EngineError):
    """A step's forward pass raised; its requests ended, no other request did.

    Attributes:
        outputs: The outputs of all of the caller's requests, in the order of the prompts; those
            that failed have an ``error``.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        """Keep the message, and the outputs so far."""
        super().__init__(message)
        self.outputs = list(outputs)


class ConcurrentCall(EngineError):
    """An ``LLM`` was called while another call to it was running."""


class EngineStopped(EngineError):
    """The engine was shut down and takes no more requests."""


class ForkedProcess(EngineStopped):
    """The engine was made before this process was forked; its threads stayed in the parent."""


@contextmanager
def naming(part: str, number: int) -> Iterator[None]:
    """Name one part of many, such as ``text 12``, in the error that refuses it."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{part} {number} (counted from 0): {error}") from error
