"""Errors of settings, requests and the cache; ``ostinato.errors`` has the whole tree.

Every message names the value, the limit and the setting to change.
"""


class OstinatoError(Exception):
    """Any error that Ostinato raises on purpose."""


class ConfigError(OstinatoError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class RequestError(OstinatoError, ValueError):
    """One request is refused; it changed nothing, and no other request is affected."""


class EmptyPrompt(RequestError):
    """A prompt has no tokens."""


class InvalidIdentity(RequestError):
    """A field of an identity is of the wrong type."""


class TokenOutOfRange(RequestError):
    """A token id is not an integer, is negative, or is not in the vocabulary."""


class PromptTooLong(RequestError):
    """A prompt can never fit the model's context or the block pool."""


class DuplicateRequest(RequestError):
    """A request id is already in use by a live request."""


class CacheMisuse(OstinatoError):
    """The cache was called in a wrong order; the call was refused and changed nothing."""


class ReleasedTable(CacheMisuse):
    """A block table was released before, or another cache admitted it."""


class StaleMatch(CacheMisuse):
    """A match is of another key or cache, or the cache or the weights have changed since."""


class StepInProgress(CacheMisuse):
    """Blocks are published or forked, and not computed: commit or fail comes first."""


class TableOverrun(CacheMisuse):
    """More tokens than a table or its sequence has, or more or fewer than were published."""


class WrongThread(CacheMisuse):
    """The cache is used by one thread at a time, and another one has live tables."""
