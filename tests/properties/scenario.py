"""A scheduler and its cache in traffic: windows, tenants, leases, epochs, erasure and events.

One real scheduler over one real cache, with the fake runner in the place of tensors. Numbers
choose among what there is; prompts have two letters and begin like something that was sent or
answered before; pools are tiny. ``ScenarioChecks`` looks at every step; the scenario itself sees
that every request ends, and with the answer that it gets alone.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ostinato.cache.block_table import BlockTable
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import RequestId
from ostinato.core.request import FinishReason, Request
from ostinato.errors import CacheInUse, DuplicateRequest, PromptTooLong
from ostinato.sched.scheduler import max_sequence_tokens
from ostinato.sched.sequence import Sequence
from ostinato.tenants.terms import LeaseStatus, LeaseTerms
from tests.properties.scenario_checks import PUBLIC, ScenarioChecks
from tests.properties.serial_reference import answer_alone
from tests.properties.settings import Settings
from tests.support.cache.fake_runner import toss_a_coin
from tests.support.cache.tiny_scheduler import TinyScheduler, make_request
from tests.support.cache.whole_state import whole_state
from tests.support.cache.wrong_calls import make_wrong_call

MAX_LIVE = 8
"""Requests that live at once; more would only make the pool look smaller."""

PLACEHOLDER = "#"
"""The token at an image's places: it tells nothing of the image."""

TENANTS = ("", "a", "b")


@dataclass(frozen=True)
class Expected:
    """A request, and text and reason of each continuation as a serial loop answers it."""

    request: Request
    answers: list[tuple[str, FinishReason]]


class Scenario:
    """One scheduler and one cache, and the events that may happen to them.

    Attributes:
        counts: What has happened so far, and how often.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tiny = TinyScheduler(settings.scheduler, settings.cache, toss_a_coin, ScenarioChecks)
        assert isinstance(self.tiny.checks, ScenarioChecks)
        self.checks, self.cache = self.tiny.checks, self.tiny.cache
        self.counts: Counter[str] = self.checks.counts
        self._longest = max_sequence_tokens(settings.scheduler, settings.cache)
        self._expected: dict[RequestId, Expected] = {}
        self._history: list[tuple[str, str]] = [("", "")]  # tenant and text
        self._num_requests = 0
        self._tables: list[BlockTable] = []  # of running sequences, and of some that ran
        self._publisher: RequestId | None = None
        self._public_texts: list[str] = []  # all that were ever published, the newest last

    # --- requests ---

    def send(
        self,
        base: int,
        cut: int,
        suffix: str,
        tenant: str | None = None,
        image: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        """Send the beginning of a known text and a new end, with an image if it fits."""
        if len(self._live()) >= MAX_LIVE:
            return
        owner, prompt = self._compose(base, cut, suffix)
        prompt = prompt[: self._longest - (self._num_requests % 8 != 0)]  # one of 8 is too long
        prompt, images = _with_image(prompt, image)
        identity = self._identity(owner if tenant is None else tenant, _text_before(prompt, images))
        request = self._request(prompt, identity, images=images, **options)
        if len(prompt) < self._longest:
            self._submit(request)
        else:
            self._check_refused(request)

    def step(self) -> None:
        """Run a step; without requests nothing is planned."""
        self.counts["steps"] += bool(self.tiny.step())
        if self.checks.admitted:
            self.checks.check_explanations(self.tiny.sequences)
        self._compare()

    def fail(self) -> None:
        """Let a step raise; as in the engine, its requests end with all their continuations."""
        before = set(self.tiny.reasons)
        if self._live():
            self.tiny.failing_step()
            self.counts["failed"] += 1
            for name in [name for name in self.tiny.reasons if name not in before]:
                self.tiny.cancel(name.partition("/")[0])
            self._compare()

    def cancel(self, choice: int) -> None:
        """Cancel a request."""
        if live := self._live():
            name = live[choice % len(live)]
            self.counts["cancelled"] += bool(self.tiny.cancel(name))
            assert name not in self._live()
            self._compare()

    def stop(self, choice: int) -> None:
        """Let a continuation that has a token reach a stop string."""
        if names := [name for name in self.tiny.outputs if name not in self.tiny.reasons]:
            self.tiny.stop(names[choice % len(names)], "stop")
            self.counts["stopped"] += 1
            self._compare()

    def preempt_all(self) -> None:
        """Preempt every sequence."""
        self.tiny.preempt_all()

    def misuse(self, choice: int) -> None:
        """Make a call that is wrong now, of the cache or of the scheduler."""
        tables = [sequence.table for sequence in self._running() if sequence.table is not None]
        released = [table for table in self._tables if table not in tables]
        self._tables = [*released[-2:], *tables]
        misused = make_wrong_call(self.cache.manager, tables, released[-2:], choice)
        self.counts["misused"] += misused
        if live := self._live():
            request = self._expected[live[choice % len(live)]].request
            with pytest.raises(DuplicateRequest):
                self.tiny.scheduler.add(request, tuple(range(request.params.n)))
        assert not self.tiny.scheduler.cancel(RequestId("nobody's"))
        self.checks.between_steps()

    # --- administration ---

    def lease(self, base: int, cut: int, terms: LeaseTerms, image: bool) -> None:
        """Ask for a known prefix to be kept."""
        tenant, text = self._compose(base, cut, "")
        text, images = _with_image(text, (1, 3) if image else None)
        key = PrefixKey(self._identity(tenant, _text_before(text, images)), map(ord, text), images)
        self.checks.after_lease(key, terms, self.cache.admin.lease(key, terms))
        self.checks.between_steps()

    def end_lease(self, choice: int) -> None:
        """Release a lease."""
        if leases := list(self.checks.leases):
            number = leases[choice % len(leases)]
            assert self.cache.admin.end_lease(number)
            assert not self.cache.admin.end_lease(number), "it has ended"
            del self.checks.leases[number]
            self.counts["lease ended"] += 1
            self.checks.between_steps()

    def publish(self, base: int, cut: int) -> None:
        """Send a request for a prefix that is to be public once it is computed."""
        size = self.settings.block_size
        text = self._compose(base, cut, "")[1][: self._longest - 1]
        text = text[: len(text) // size * size]
        if self._publisher is None and text and not self.cache.admin.is_public(PUBLIC):
            request = self._request(text, self._identity(PUBLIC.decode()), max_tokens=1)
            self._publisher = request.request_id
            self._submit(request)

    def unpublish(self) -> None:
        """Erase the public prefix and what continues it, after its readers have ended."""
        self._erase(PUBLIC, [s for s in self._running() if s.key.identity.belongs_to(PUBLIC)])
        self.counts["unpublished"] += 1

    def wait(self, seconds: int) -> None:
        """Let time pass."""
        self.tiny.num_steps += seconds

    def new_epoch(self) -> None:
        """Change the weights while requests run."""
        self.counts["epochs"] += 1
        assert self.cache.admin.new_epoch() == self.counts["epochs"]
        self.checks.leases.clear()
        self._know_identities()
        self.checks.after_new_epoch()

    def erase(self, tenant: str, waits: bool) -> None:
        """Erase a tenant: refused while its requests run, so they may have to end first."""
        salt = tenant.encode()
        running = [s for s in self._running() if s.table and s.table.tenant == salt]
        if waits and running:
            self._check_erasure_is_refused(salt)
        else:
            self._erase(salt, running)
            self.counts["erased"] += 1

    def reset(self) -> None:
        """Preempt every sequence and empty the cache."""
        self.tiny.preempt_all()
        self.cache.admin.reset()
        self.checks.leases.clear()
        self.counts["resets"] += 1
        self.checks.after_reset()

    def finish(self) -> None:
        """Send nothing more: every request ends, and nothing is held afterwards (laws 7 and 9)."""
        self.counts["steps"] += len(self.tiny.run(most=self._most_steps()))
        self._compare()
        assert not self._expected, f"lost: {list(self._expected)}"
        self.unpublish()
        for number in list(self.checks.leases):
            self.cache.admin.end_lease(number)
        self.checks.leases.clear()
        self.checks.everything_ended()

    # --- what is compared ---

    def _compare(self) -> None:
        """Compare the answers of those requests that have ended, and forget them."""
        live = set(self._live())
        for request_id in [name for name in self._expected if name not in live]:
            expected = self._expected.pop(request_id)
            for index, (answer, reason) in enumerate(expected.answers):
                name = f"{request_id}/{index}" if index else request_id
                self._compare_answer(name, answer, reason)
            self._compare_logprobs(expected.request)
            if request_id == self._publisher:
                self._publish(expected.request)
        for name in [name for name in self.tiny.reasons if name.partition("/")[0] not in live]:
            del self.tiny.reasons[name]
            self.tiny.outputs.pop(name, None)
            if (sequence := self.tiny.sequences.pop(name, None)) is not None:
                self._remember(sequence.key)

    def _compare_answer(self, name: str, answer: str, reason: FinishReason) -> None:
        """Law 7: company, cache and mishaps change no token."""
        output, sequence = self.tiny.outputs.get(name, ""), self.tiny.sequences.get(name)
        whole = name.partition("/")[0]  # a continuation that was never forked ends with it
        ended = self.tiny.reasons.get(name, self.tiny.reasons[whole])
        cut_short = ended in (FinishReason.ABORT, FinishReason.ERROR)
        if cut_short or (sequence is not None and sequence.stop_reason == "stop"):
            assert answer.startswith(output), f"{name} answers {output}, not {answer}"
        else:
            assert (output, ended) == (answer, reason), f"{name}: {output} instead of {answer}"
            self.counts["answers"] += 1

    def _compare_logprobs(self, request: Request) -> None:
        """Each prompt token from the second on has one, once, and of its own position."""
        name = request.request_id
        if request.params.prompt_logprobs is not None and self.tiny.outputs.get(name):
            logprobs = self.tiny.sequences[name].prompt_logprobs
            found = [(t[0].token_id, -t[0].logprob) for t in logprobs]
            assert found == [(t, p) for p, t in enumerate(request.prompt_token_ids)][1:]
            self.counts["prompt log-probs"] += 1

    def _check_refused(self, request: Request) -> None:
        """Law 6: too long for the model or the pool."""
        try:
            self.tiny.scheduler.add(request, tuple(range(request.params.n)))
        except PromptTooLong:
            self.counts["refused"] += 1
        else:
            raise AssertionError("a prompt that can never fit was taken")

    def _check_erasure_is_refused(self, tenant: bytes) -> None:
        before = whole_state(self.cache.manager)
        try:
            self.cache.admin.erase(tenant)
        except CacheInUse:
            assert whole_state(self.cache.manager) == before, "a refusal changed something"
            self.counts["erasure refused"] += 1
        else:
            raise AssertionError("a running tenant was erased")

    # --- helpers ---

    def _submit(self, request: Request) -> None:
        first, n = self._num_requests % 3, request.params.n
        seeds = tuple(range(first, first + n))
        answers = [answer_alone(request, seed, self._longest, toss_a_coin) for seed in seeds]
        self._expected[request.request_id] = Expected(request, answers)
        self._remember(PrefixKey(request.identity, request.prompt_token_ids))
        self.tiny.add_request(request, seeds)
        self.counts["arrived"] += 1

    def _request(
        self, prompt: str, identity: Identity, eos: str = "", stop: str = "", **options: Any
    ) -> Request:
        self._num_requests += 1
        if stop == eos:
            stop = ""
        if eos and stop:  # the sampler must have a letter left
            options["min_tokens"] = 0
        most = options.get("max_tokens")
        if most is not None:
            options["min_tokens"] = min(options.get("min_tokens", 0), most)
        name = f"request {self._num_requests}"
        request = make_request(name, prompt, eos=eos, stop=stop, **options)
        return replace(request, identity=identity)

    def _compose(self, base: int, cut: int, suffix: str) -> tuple[str, str]:
        """Return a known text, cut and continued, and whose it was."""
        tenant, known = self._history[base % len(self._history)]
        return tenant, known[: cut % (len(known) + 1)] + suffix or "A"

    def _remember(self, key: PrefixKey) -> None:
        tenant = "" if key.identity.tenant == PUBLIC else key.identity.tenant.decode()
        self._history = [*self._history[-9:], (tenant, "".join(map(chr, key.tokens)))]

    def _identity(self, tenant: str, prompt: str = "") -> Identity:
        """Return whose a prompt is, and whether it begins with the public prefix."""
        text = self._public_texts[-1] if self._public_texts else ""
        is_public = text and self.cache.admin.is_public(PUBLIC)
        if is_public and len(prompt) > len(text) and prompt.startswith(text):
            return self._after_public(tenant, text)
        return Identity(tenant=tenant.encode(), epoch=self.cache.manager.epoch)

    def _after_public(self, tenant: str, text: str) -> Identity:
        public = Identity(tenant=PUBLIC, epoch=self.cache.manager.epoch)
        return replace(public, tenant=tenant.encode(), base=public, start=len(text))

    def _know_identities(self) -> None:
        """Waiting requests may be admitted under these weights, with any earlier public prefix."""
        for tenant in (*TENANTS, PUBLIC.decode()):
            self.checks.oracle.know(self._identity(tenant))
            for text in self._public_texts:
                self.checks.oracle.know(self._after_public(tenant, text))

    def _publish(self, request: Request) -> None:
        """Publish the prefix that a request has computed; none of it if that failed."""
        self._publisher = None
        key = PrefixKey(self._identity(PUBLIC.decode()), request.prompt_token_ids)
        receipt = self.cache.admin.publish(key)
        self.checks.expire()
        self.counts[f"publication {receipt.status}"] += 1
        if receipt.status == LeaseStatus.ACCEPTED:
            self._public_texts.append("".join(map(chr, key.tokens)))
            self._know_identities()

    def _erase(self, tenant: bytes, running: list[Sequence]) -> None:
        """Cancel, erase, and overwrite, as the engine does, all slots that hold no live token."""
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in running):
            self.tiny.cancel(request_id)
        self._compare()
        receipt = self.cache.admin.erase(tenant)
        blocks = self.cache.admin.live_slots()
        states = blocks.pop() if self.settings.states else {}
        for slot in range(len(self.tiny.runner.states)):
            if slot not in states:
                self.tiny.runner.states[slot] = "erased"
        for store, live in zip(self.tiny.runner.stores, blocks, strict=True):
            for slot in range(len(store)):
                block, offset = divmod(slot, self.settings.block_size)
                if offset >= live.get(block, 0):
                    store[slot] = "erased"
        self.checks.after_erasure(tenant, receipt)

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self.checks.live() if sequence.table is not None]

    def _live(self) -> list[RequestId]:
        """Return the live requests, by rank of their first continuation."""
        return list(dict.fromkeys(s.request.request_id for s in self.checks.live()))

    def _most_steps(self) -> int:
        """Bound the steps to the end: in every step the first in rank gains a token.

        A sequence may have to begin again when one of better rank comes back, which happens
        once for each of those.
        """
        live = self.checks.live()
        num_sequences = sum(s.request.params.n for s in live if s.index == 0) + len(live)
        return (num_sequences + 1) ** 2 * (self._longest + 2)


def _text_before(prompt: str, images: tuple[ImageSpan, ...]) -> str:
    """Return the part of a prompt in which a public prefix may end: as in the engine, no image."""
    return prompt[: images[0].start] if images else prompt


def _with_image(prompt: str, image: tuple[int, int] | None) -> tuple[str, tuple[ImageSpan, ...]]:
    """Return a prompt with an image's placeholders in it, if the image fits."""
    if image is None or sum(image) > len(prompt):
        return prompt, ()
    start, length = image
    shown = prompt[:start] + PLACEHOLDER * length + prompt[start + length :]
    return shown, (ImageSpan(b"cat", start, length),)
