"""Traffic: one scheduler, and whatever may happen to it.

Numbers choose among what there is, so that a random walk and Hypothesis tell the same stories.
Prompts have two letters, and begin like something that was sent or answered before; pools are
tiny. The watch looks at every step; here it is seen to that everybody ends, and with the answer
that they would have got alone.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.config import (
    CacheConfig,
    FreeOrder,
    IndexName,
    SchedulerConfig,
    WaitingOrder,
    WindowConfig,
    window_blocks,
)
from ostinato.core.errors import PromptTooLong
from ostinato.core.identity import ImageSpan
from ostinato.core.request import FinishReason, Request
from ostinato.observe.introspection import cached_blocks
from ostinato.sched.admission import max_sequence_tokens
from tests.sched.alone import answer_alone
from tests.support.fake_runner import toss_a_coin
from tests.support.tiny_scheduler import TinyScheduler, make_request

MAX_LIVE = 8
"""Requests that live at once; more would only make the pool look smaller."""

PLACEHOLDER = "#"
"""The token at an image's places: it tells nothing of the image."""

TENANTS = ("", "", "", "t")


@dataclass(frozen=True)
class Setting:
    """What kind of world; fields are those of the two configs.

    Of windows, the size of each and its pool's blocks beyond the fewest possible.
    """

    num_blocks: int
    block_size: int
    index: IndexName = "radix"
    free_order: FreeOrder = "scratch_first"
    seal_tails: bool = True
    enable_prefix_caching: bool = True
    max_num_seqs: int = 4
    spare_budget: int = 4
    max_chunk_tokens: int | None = None
    max_model_len: int = 2**31
    order: WaitingOrder = "fcfs"
    max_overtakes: int = 2
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def cache(self) -> CacheConfig:
        """Settings of the cache."""
        return CacheConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            index=self.index,
            free_order=self.free_order,
            seal_tails=self.seal_tails,
            enable_prefix_caching=self.enable_prefix_caching,
            windows=tuple(
                WindowConfig(window, window_blocks(window, self.block_size) + spare)
                for window, spare in self.windows
            ),
        )

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings of the scheduler; its budget has room for every seat, and some to spare."""
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_seqs + self.spare_budget,
            max_num_seqs=self.max_num_seqs,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=self.max_model_len,
            order=self.order,
            max_overtakes=self.max_overtakes,
        )


@dataclass(frozen=True)
class Wish:
    """What somebody sends, but for the prompt.

    Attributes:
        n: Continuations.
        max_tokens: Most tokens of each; None is up to the pool.
        min_tokens: Tokens before which nothing stops.
        priority: Lower goes first.
        tenant: Number of a tenant.
        reads: Whether it may hit.
        writes: Whether others may hit what it computes.
        prompt_logprobs: Whether it wants them.
        eos: Letters that end it, unless it ignores them.
        ignore_eos: Whether it does.
        stop: Letters that stop it; a letter is one or the other.
        image: Start and length of an image; none if it does not fit.
    """

    n: int = 1
    max_tokens: int | None = 3
    min_tokens: int = 0
    priority: int = 0
    tenant: int = 0
    reads: bool = True
    writes: bool = True
    prompt_logprobs: bool = False
    eos: str = ""
    ignore_eos: bool = False
    stop: str = ""
    image: tuple[int, int] | None = None


@dataclass
class Expected:
    """A request and what it should bring.

    Attributes:
        request: As it was added.
        answers: Text and reason of each continuation, alone.
    """

    request: Request
    answers: list[tuple[str, FinishReason]] = field(default_factory=list)


class World:
    """One scheduler with traffic."""

    def __init__(self, setting: Setting) -> None:
        """Open for business."""
        self.setting = setting
        self.tiny = TinyScheduler(setting.scheduler, setting.cache, toss_a_coin)
        self.longest = max_sequence_tokens(setting.scheduler, setting.cache)
        self.met: Counter[str] = Counter()
        self._expected: dict[str, Expected] = {}
        self._history: list[str] = [""]
        self._num_requests = 0

    # --- what can happen ---

    def arrive(self, base: int, cut: int, suffix: str, wish: Wish) -> None:
        """Somebody sends the beginning of something known, and a new end."""
        known = self._history[base % len(self._history)]
        too_long = self._num_requests % 8 == 0
        most = self.longest - 1 + too_long
        prompt = (known[: cut % (len(known) + 1)] + suffix or "A")[:most]
        if len(self._live) >= MAX_LIVE:
            return
        request = self._request(prompt, wish)
        seeds = tuple(range(self._num_requests % 3, self._num_requests % 3 + wish.n))
        if not self._is_servable(prompt):
            self._is_refused(request, seeds)
            return
        self._remember(prompt)
        self._expected[request.request_id] = Expected(
            request, [answer_alone(request, seed, self.longest, toss_a_coin) for seed in seeds]
        )
        self.tiny.add_request(request, seeds)
        self.met["arrived"] += 1

    def step(self) -> None:
        """A step runs; without requests nothing is planned."""
        self.met["steps"] += bool(self.tiny.step())
        self._compare()

    def fail(self) -> None:
        """A step raises; as in the engine, its requests end with all their continuations."""
        before = set(self.tiny.reasons)
        if not self._live:
            return
        self.tiny.failing_step()
        self.met["failed"] += 1
        for name in [name for name in self.tiny.reasons if name not in before]:
            self.tiny.cancel(name.partition("/")[0])
        self._compare()

    def cancel(self, choice: int) -> None:
        """Somebody hangs up."""
        if self._live:
            name = self._live[choice % len(self._live)]
            self.met["cancelled"] += bool(self.tiny.cancel(name))
            assert name not in self._live
            self._compare()

    def stop(self, choice: int) -> None:
        """One continuation reaches a stop string; it has a token at least."""
        names = [name for name in self.tiny.outputs if name not in self.tiny.reasons]
        if names:
            self.tiny.stop(names[choice % len(names)], "stop")
            self.met["stopped"] += 1
            self._compare()

    def preempt_all(self) -> None:
        """Everybody has to come back."""
        self.tiny.preempt_all()

    def reset(self) -> None:
        """Everybody has to come back, and nothing is cached any more."""
        self.tiny.reset()
        assert list(cached_blocks(self.tiny.cache.manager.index)) == []

    def finish(self) -> None:
        """Nobody comes any more, and everybody gets to the end (laws 7 and 9)."""
        self.met["steps"] += len(self.tiny.run(most=self._most_steps()))
        self._compare()
        assert not self._expected, f"lost: {list(self._expected)}"
        self.met += self.tiny.watch.met

    # --- what is compared ---

    def _compare(self) -> None:
        """Compare the answers of those requests that have ended, and forget them."""
        for name in [name for name in self._expected if name not in self._live]:
            expected = self._expected.pop(name)
            for index, (answer, reason) in enumerate(expected.answers):
                continuation = f"{name}/{index}" if index else name
                self._compare_one(continuation, answer, reason)
            self._compare_logprobs(name, expected.request)
        for name in list(self.tiny.reasons):
            if name.partition("/")[0] not in self._expected:
                self._remember(self._text(name))
                self._forget(name)

    def _compare_one(self, name: str, answer: str, reason: FinishReason) -> None:
        """Law 7: company, cache and mishaps change no token."""
        output, sequence = self.tiny.outputs.get(name, ""), self.tiny.sequences.get(name)
        whole = name.partition("/")[0]  # a sibling that was never forked ends with it
        ended = self.tiny.reasons.get(name, self.tiny.reasons[whole])
        cut_short = ended in (FinishReason.ABORT, FinishReason.ERROR)
        if cut_short or (sequence is not None and sequence.stop_reason == "stop"):
            assert answer.startswith(output), f"{name} answers {output}, not {answer}"
        else:
            assert (output, ended) == (answer, reason), f"{name}: {output} instead of {answer}"
            self.met["answers"] += 1

    def _compare_logprobs(self, name: str, request: Request) -> None:
        """Each prompt token from the second on has one, once, and of its own position."""
        if request.params.prompt_logprobs is None or not self.tiny.outputs.get(name):
            return
        found = [(t[0].token_id, -t[0].logprob) for t in self.tiny.sequences[name].prompt_logprobs]
        assert found == [(t, p) for p, t in enumerate(request.prompt_token_ids)][1:]
        self.met["prompt log-probs"] += 1

    # --- small print ---

    @property
    def _live(self) -> list[str]:
        """Names of the live requests, by rank of their first continuation."""
        return list(dict.fromkeys(s.request.request_id for s in self.tiny.watch.live()))

    def _most_steps(self) -> int:
        """A bound: in every step the first in rank of the running gets on by a token.

        A sequence may have to begin again when one of better rank comes back, which happens
        once for each of those.
        """
        live = self.tiny.watch.live()
        num_sequences = sum(s.request.params.n for s in live if s.index == 0) + len(live)
        return (num_sequences + 1) ** 2 * (self.longest + 2)

    def _is_servable(self, prompt: str) -> bool:
        return len(prompt) < self.setting.max_model_len and len(prompt) <= self.longest - 1

    def _is_refused(self, request: Request, seeds: tuple[int, ...]) -> None:
        """Law 6: too long for the model or the pool."""
        try:
            self.tiny.scheduler.add(request, seeds)
        except PromptTooLong:
            self.met["refused"] += 1
        else:
            raise AssertionError("a prompt that can never fit was taken")

    def _request(self, prompt: str, wish: Wish) -> Request:
        self._num_requests += 1
        images: tuple[ImageSpan, ...] = ()
        if wish.image is not None and sum(wish.image) <= len(prompt):
            images = (ImageSpan(b"cat", *wish.image),)
            start, end = images[0].start, images[0].end
            prompt = prompt[:start] + PLACEHOLDER * (end - start) + prompt[end:]
        stop = wish.stop if wish.stop != wish.eos else ""
        limits: dict[str, Any] = {"n": wish.n, "max_tokens": wish.max_tokens}
        if stop == "" or wish.eos == "":  # the sampler must have a letter left
            limits["min_tokens"] = min(wish.min_tokens, wish.max_tokens or wish.min_tokens)
        return make_request(
            f"request {self._num_requests}",
            prompt,
            tenant=TENANTS[wish.tenant % len(TENANTS)],
            images=images,
            priority=wish.priority,
            cache_read=wish.reads,
            cache_write=wish.writes,
            prompt_logprobs=0 if wish.prompt_logprobs else None,
            eos=wish.eos,
            ignore_eos=wish.ignore_eos,
            stop=stop,
            **limits,
        )

    def _text(self, name: str) -> str:
        sequence = self.tiny.sequences.get(name)
        return "" if sequence is None else "".join(map(chr, sequence.key.tokens))

    def _remember(self, text: str) -> None:
        self._history = [*self._history[-20:], text]

    def _forget(self, name: str) -> None:
        del self.tiny.reasons[name]
        self.tiny.outputs.pop(name, None)
        self.tiny.sequences.pop(name, None)
