"""Routers and events as tests write them: letters as tokens, blocks of four."""

from collections.abc import Sequence

from ostinato.router import Router, RouterConfig, RouteRequest
from ostinato.router.policy.events import Cleared, Event, EventBatch, Removed, Stored


def fleet(workers: str = "abc", **settings) -> Router:
    """Return a router over workers named by letters, which send no events so far."""
    router = Router(RouterConfig(**settings))
    for name in workers:
        router.add_worker(name, block_size=4)
    return router


def prompt(text: str, **fields) -> RouteRequest:
    """Return a request for a text whose letters are tokens."""
    return RouteRequest([ord(letter) for letter in text], **fields)


def stored(text: str, behind: str = "", **fields) -> Stored:
    """Return the event that the blocks of a text were stored behind others.

    A block's name is its text and all before it, as an engine's hash would be.
    """
    whole = behind + text
    ends = range(len(behind) + 4, len(whole) + 1, 4)
    names = tuple(whole[:end].encode() for end in ends)
    tokens = tuple(ord(letter) for letter in text)
    return Stored(names, behind.encode() or None, tokens, 4, **fields)


def removed(*texts: str) -> Removed:
    """Return the event that the last blocks of those prefixes are gone."""
    return Removed(tuple(text.encode() for text in texts))


def batch(sequence: int, *events: Event, time_s: float | None = None) -> EventBatch:
    """Return a batch, sent at its number's second."""
    return EventBatch(sequence, float(sequence) if time_s is None else time_s, events)


def cleared() -> Cleared:
    """Return the event that nothing is cached any more."""
    return Cleared()


def picture(router: Router, text: str, now: float = 0.0, names: Sequence[str] = "abc") -> str:
    """Return what each worker has of a prompt, by its events: ``a:exact 8 b:guessed 0``."""
    looked_up = router.look_up(prompt(text), now)
    return " ".join(
        f"{each.worker}:{each.state.value} {each.cached_tokens}"
        for each in looked_up
        if each.worker in names
    )
