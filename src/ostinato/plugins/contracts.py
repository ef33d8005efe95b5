"""What a plug-in has to pass before it serves; each failure is a counterexample in words.

Tokens are letters, blocks have two tokens, and every slot keeps the text of all tokens up to its
own, so that a wrong hit is seen (law 3). Short scenarios come first.
"""

import traceback
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import BlockShares
from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.core.tokens import pack_tokens
from ostinato.observe.prompt_diff import num_alike
from ostinato.plugins.child import TimeUp
from ostinato.plugins.plugged import index_factory, order_factory, policy_factory
from ostinato.sched.scheduler import Scheduler

_BLOCK = 2


class Broken(Exception):
    """A plug-in breaks its contract; the text is the counterexample."""


def failure_of(setting: str, value: str) -> str:
    """Return the first failure of a plug-in's contract; empty if it passes."""
    try:
        CONTRACTS[setting](value)
    except (Broken, ConfigError) as error:
        return str(error)
    except TimeUp as error:
        return f"it does not return; it was {_place(error)}"
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}, {_place(error)}"
    return ""


def _place(error: BaseException) -> str:
    """Return where the last frame outside this package is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/ostinato/" not in frame.filename]
    if not own:
        return "in Ostinato's own code"
    return f"in {own[-1].name}, line {own[-1].lineno}: {own[-1].line}"


class LetterCache:
    """A cache manager over letters, with the text of every slot.

    Attributes:
        story: What was done so far, for messages.
    """

    def __init__(self, num_blocks: int, **parts: Any) -> None:
        """Make an empty cache with parts of a ``CacheManager``."""
        self.manager = CacheManager(CacheConfig(num_blocks, _BLOCK), lambda: 0.0, **parts)
        self.texts: dict[int, str] = {}
        self.story: list[str] = []

    def begin(self, prompt: str) -> BlockTable | None:
        """Admit a prompt and compute all of it; None if it does not fit."""
        key = PrefixKey(Identity(), map(ord, prompt))
        match = self.manager.match(key)
        self.story.append(f"{prompt}: {match.num_tokens} tokens found")
        for place, block in enumerate(match.blocks):
            held, text = self.texts.get(block, "nothing"), prompt[: (place + 1) * _BLOCK]
            self.require(held == text, f"block {block} holds {held}, and {text} was looked up")
        if match.tail is not None:
            end = match.num_tokens
            text = self.texts.get(match.tail.block, "")[:end]
            self.require(text == prompt[:end], f"block {match.tail.block} holds {text!r}")
        self.num_hits = match.num_shared_tokens
        admitted = self.manager.admit(key, match)
        if admitted is None:
            self.manager.commit()
            return None
        table = admitted[0]
        for place in range(table.num_shared_tokens // _BLOCK, len(table.blocks)):
            self.texts[table.blocks[place]] = prompt[: (place + 1) * _BLOCK]
        self.manager.publish(table, len(prompt))
        self.manager.commit()
        return table

    def end(self, table: BlockTable, num_tokens: int) -> None:
        """End a request."""
        self.manager.release(table, num_tokens)

    def serve(self, prompt: str) -> int:
        """Admit, compute and end a prompt; return how many tokens hit in whole blocks."""
        table = self.begin(prompt)
        num_hits = self.num_hits
        if table is not None:
            self.end(table, len(prompt))
        return num_hits

    def require(self, holds: bool, why: str) -> None:
        """Raise Broken with the story so far unless something holds."""
        if not holds:
            raise Broken(f"{why}. Requests so far: {'; '.join(self.story)}")


def _prompts(longest: int) -> Iterator[str]:
    """Walk all texts of two letters, the short ones first."""
    for length in range(1, longest + 1):
        yield from map("".join, product("AB", repeat=length))


def check_index(value: str) -> None:
    """Check a prefix index: it finds all that is cached, nothing else, and forgets what it must."""
    make_index = index_factory(value)
    for scenario in _scenarios():
        cache, served = LetterCache(24, make_index=make_index), list[str]()
        for prompt in scenario:
            num_hits = cache.serve(prompt)
            longest = max([min(num_alike(prompt, p), len(prompt) - 1) for p in served], default=0)
            expected = longest // _BLOCK * _BLOCK
            cache.require(num_hits == expected, f"{expected} tokens in whole blocks are cached")
            served.append(prompt)
            _no_faults(cache, cache.manager.index)
        cache.manager.check()
    _walk(lambda: LetterCache(4, make_index=make_index), lambda cache: cache.manager.index)


def _scenarios() -> Iterator[list[str]]:
    yield from ([one, one] for one in _prompts(5))
    yield from ([one, other] for one in _prompts(3) for other in _prompts(4))
    draw = Random(1)
    texts = list(_prompts(7))
    yield from (draw.choices(texts, k=5) for _ in range(60))


def check_policy(value: str) -> None:
    """Check an eviction policy: its victims are evictable leaves, and it forgets what is held."""
    policy = policy_factory(value)
    _walk(
        lambda: LetterCache(4, shares=BlockShares(policy(4, lambda: 0.0))),
        lambda cache: cache.manager.pool.shares.policies[0],
    )


def _walk(make: Callable[[], LetterCache], part: Callable[[LetterCache], object]) -> None:
    """Serve random prompts from a pool of four blocks, some of them at once."""
    for seed in range(40):
        draw, cache, live = Random(seed), make(), list[tuple[BlockTable, int]]()
        for _ in range(12):
            if live and draw.random() < 0.5:
                cache.end(*live.pop(draw.randrange(len(live))))
            elif len(live) < 2:
                prompt = "".join(draw.choices("AB", k=draw.randint(1, 7)))
                table = cache.begin(prompt) if len(prompt) < 8 else None
                live += [] if table is None else [(table, len(prompt))]
            _no_faults(cache, part(cache))
            cache.manager.check()
        for table, num_tokens in live:
            cache.end(table, num_tokens)


def _no_faults(cache: LetterCache, part: object) -> None:
    faults = getattr(part, "faults", None)
    cache.require(faults is None or not faults.num_faults, getattr(faults, "first", ""))


def check_order(value: str) -> None:
    """Check a waiting order: every request is served in the end, whatever it ranks first."""
    for seed in range(10):
        draw = Random(seed)
        cache = CacheManager(CacheConfig(8, _BLOCK), lambda: 0.0)
        config = SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=2, max_model_len=12)
        scheduler = Scheduler(config, cache, lambda: 0.0, order_factory(value, 3))
        names = [f"request {number}" for number in range(8)]
        for name in names:
            text = "".join(draw.choices("AB", k=draw.randint(1, 7)))
            scheduler.add(_request(name, text), (0,))
        for _ in range(200):
            if not scheduler.has_work:
                break
            scheduler.commit(_run(scheduler.plan()))
        if scheduler.has_work:
            raise Broken(f"of {len(names)} requests {len(scheduler.requests.live)} never run")
        faults = getattr(scheduler.requests.order, "faults", None)
        if faults is not None and faults.num_faults:
            raise Broken(faults.first)


def _request(name: str, text: str) -> Request:
    params = SamplingParams(max_tokens=2)
    return Request(RequestId(name), pack_tokens([ord(letter) for letter in text]), params)


def _run(plan: StepPlan) -> StepResult:
    """Return a result in which every sequence samples an A."""
    outcomes = (
        SequenceResult(tuple(SampledToken(65) for _ in s.sample.seeds) if s.sample else ())
        for s in plan.sequences
    )
    return StepResult(tuple(outcomes))


CONTRACTS: dict[str, Callable[[str], None]] = {
    "index": check_index,
    "eviction_policy": check_policy,
    "order": check_order,
}
"""By the setting that names the plug-in."""
