"""The whole heart in traffic: windows, tenants, leases, epochs, erasure and events at once.

One real scheduler over one real cache, with the fake runner in the place of tensors. Numbers
choose among what there is; prompts have two letters and begin like something that was sent or
answered before; pools are tiny. What must be true of every step is in ``heart_watch``; here it
is seen to that everybody ends, and with the answer that they would have got alone.
"""

from collections import Counter
from dataclasses import replace

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.errors import CacheInUse
from ostinato.core.identity import Identity, ImageSpan, PrefixKey, PublicPrefix
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.request import FinishReason, Request
from ostinato.sched.admission import max_sequence_tokens
from ostinato.sched.sequence import Sequence, SequenceUpdate
from ostinato.tenants.terms import LeaseStatus, LeaseTerms
from tests.properties.heart_setting import Setting, Wish
from tests.properties.heart_watch import PUBLIC, HeartWatch
from tests.sched.alone import answer_alone
from tests.support.fake_runner import FakeRunner, ForwardPassFailed, toss_a_coin
from tests.support.tiny_scheduler import make_request

MAX_LIVE = 8
"""Requests that live at once; more would only make the pool look smaller."""

TENANTS = ("", "a", "b")


class Heart:
    """One scheduler and one cache with everything switched on.

    Attributes:
        met: What has happened so far, and how often.
    """

    def __init__(self, setting: Setting) -> None:
        """Open for business."""
        self.setting, self.now = setting, 0.0
        config = setting.cache
        self.cache = build_cache(config, clock=lambda: self.now)
        self.scheduler = build_scheduler(setting.scheduler, self.cache, clock=lambda: self.now)
        self.runner = FakeRunner(config, toss_a_coin)
        self.watch = HeartWatch(self.scheduler, self.cache, self.runner, lambda: self.now)
        self.met: Counter[str] = self.watch.met
        self._size = setting.block_size
        self._longest = max_sequence_tokens(setting.scheduler, config)
        self._requests: dict[RequestId, Request] = {}
        self._answers: dict[RequestId, list[tuple[str, FinishReason]]] = {}
        self._history: list[tuple[str, str]] = [("", "")]
        self._num_requests = self._num_sequences = 0
        self._publisher: RequestId | None = None
        self._heads: list[str] = []  # all that were ever published, the newest last

    # --- traffic ---

    def arrive(self, base: int, cut: int, suffix: str, wish: Wish) -> None:
        """Somebody sends the beginning of something known, and a new end."""
        if len(self._requests) >= MAX_LIVE:
            return
        tenant, prompt = self._compose(base, cut, suffix)
        if wish.tenant is not None:
            tenant = TENANTS[wish.tenant % 3]
        prompt = prompt[: self._longest - 1]
        self._send(self._request(prompt, self._identity(tenant, prompt), wish), wish.n)
        self.met["arrived"] += 1

    def _send(self, request: Request, n: int) -> None:
        first = self._num_requests % 3
        seeds = tuple(range(first, first + n))
        answers = [answer_alone(request, seed, self._longest, toss_a_coin) for seed in seeds]
        self._requests[request.request_id] = request
        self._remember(request.identity, "".join(map(chr, request.prompt_token_ids)))
        self._answers[request.request_id] = answers
        self.scheduler.add(request, seeds)
        self.runner.expect(SequenceId(self._num_sequences), request, seeds)
        self._num_sequences += n
        self.watch.know(request.identity)

    def step(self, fails: bool = False) -> None:
        """A step runs, or raises; without requests nothing is planned."""
        self.now += 1.0
        self.watch.before_plan()
        plan = self.scheduler.plan()
        self.watch.after_plan(plan)
        if not plan.sequences:
            return
        if fails:
            self.runner.fail_next()
        try:
            updates = self.scheduler.commit(self.runner.execute(plan))
        except ForwardPassFailed:
            updates = self.scheduler.fail()
            self.met["failed"] += 1
        for update in updates:
            self._take(update)
        if fails:  # as in the engine, a request ends with all its continuations
            for update in updates:
                self._cancel(update.sequence.request.request_id)
        self.watch.after_step()
        self.met["steps"] += 1

    def fail(self) -> None:
        """A step raises."""
        self.step(fails=True)

    def cancel(self, choice: int) -> None:
        """Somebody hangs up."""
        if self._requests:
            self._cancel(list(self._requests)[choice % len(self._requests)])
            self.met["cancelled"] += 1
            self.watch.between_steps()

    def stop(self, choice: int) -> None:
        """One continuation reaches a stop string; it has a token at least."""
        speaking = [s for s in self.watch.live() if s.num_output_tokens]
        if speaking:
            sequence = speaking[choice % len(speaking)]
            self.scheduler.finish(sequence, FinishReason.STOP, "stop")
            self._end(sequence)
            self.met["stopped"] += 1
            self.watch.between_steps()

    def preempt_all(self) -> None:
        """Everybody has to come back."""
        self.scheduler.preempt_all()
        self.watch.between_steps()

    # --- administration ---

    def lease(self, base: int, cut: int, terms: LeaseTerms, image: bool) -> None:
        """Somebody wants a prefix to be kept."""
        tenant, tokens = self._compose(base, cut, "")
        spans = (ImageSpan(b"cat", 1, 3),) if image and len(tokens) > 3 else ()
        key = PrefixKey(self._identity(tenant, tokens), map(ord, tokens), spans)
        self.watch.leased(key, terms, self.cache.admin.lease(key, terms))
        self.watch.between_steps()

    def end_lease(self, choice: int) -> None:
        """A lease is given back."""
        leases = list(self.watch.leases)
        if leases:
            number = leases[choice % len(leases)]
            assert self.cache.admin.end_lease(number)
            assert not self.cache.admin.end_lease(number), "it has ended"
            del self.watch.leases[number]
            self.met["lease ended"] += 1
            self.watch.between_steps()

    def publish(self, base: int, cut: int) -> None:
        """The administrator has a prefix computed, to be published when that is done."""
        text = self._compose(base, cut, "")[1]
        text = text[: len(text) // self._size * self._size][: self._longest - 1]
        text = text[: len(text) // self._size * self._size]
        if self._publisher is None and text and not self.cache.admin.is_public(PUBLIC):
            request = self._request(text, self._identity(PUBLIC.decode()), Wish(max_tokens=1))
            self._publisher = request.request_id
            self._send(request, 1)

    def unpublish(self) -> None:
        """What hangs behind the public prefix goes with it; its readers have to end first."""
        running = [s for s in self.watch.live() if s.table and s.key.identity.belongs_to(PUBLIC)]
        for sequence in running:
            self._cancel(sequence.request.request_id)
        receipt = self.cache.admin.erase(PUBLIC)
        self._overwrite(self.cache.admin.live_slots())
        self.watch.after_erasure(PUBLIC, receipt)
        self.met["unpublished"] += 1

    def wait(self, seconds: int) -> None:
        """Time goes by."""
        self.now += seconds

    def new_epoch(self) -> None:
        """The weights change while requests run."""
        self.met["epochs"] += 1
        assert self.cache.admin.new_epoch() == self.met["epochs"]
        self.watch.leases.clear()
        self._know_everybody()
        self.watch.after_new_epoch()

    def erase(self, choice: int, waits: bool) -> None:
        """Nothing of a tenant may stay; its requests have to end first."""
        tenant = TENANTS[choice % 3].encode()
        running = [s for s in self.watch.live() if s.table and s.table.tenant == tenant]
        if waits and running:
            before = self.cache.manager.describe()
            try:
                self.cache.admin.erase(tenant)
            except CacheInUse:
                assert self.cache.manager.describe() == before, "a refusal changed something"
                self.met["erasure refused"] += 1
                return
            raise AssertionError("a running tenant was erased")
        for sequence in running:
            self._cancel(sequence.request.request_id)
        receipt = self.cache.admin.erase(tenant)
        self._overwrite(self.cache.admin.live_slots())
        self.met["erased"] += 1
        self.watch.after_erasure(tenant, receipt)

    def reset(self) -> None:
        """Everybody has to come back, and nothing is cached any more."""
        self.scheduler.preempt_all()
        self.cache.admin.reset()
        self.watch.leases.clear()
        self.met["resets"] += 1
        self.watch.after_reset()

    def finish(self) -> None:
        """Nobody comes any more, and everybody gets to the end (laws 7 and 9)."""
        most = (self._num_live_sequences() + 1) ** 2 * (self._longest + 2)
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"still alive after {most} steps"
        assert not self._requests, f"lost: {list(self._requests)}"
        self.unpublish()
        for number in list(self.watch.leases):
            self.cache.admin.end_lease(number)
        self.watch.leases.clear()
        self.watch.nothing_runs()

    # --- small print ---

    def _overwrite(self, live: list[dict[int, int]]) -> None:
        """Overwrite, as the engine does, all slots but the first so many of live blocks."""
        for store, counts in zip(self.runner.stores, live, strict=True):
            for slot in range(len(store)):
                block, offset = divmod(slot, self._size)
                if offset >= counts.get(block, 0):
                    store[slot] = "erased"

    def _compose(self, base: int, cut: int, suffix: str) -> tuple[str, str]:
        """Return something known, cut and continued, and whose it was."""
        tenant, known = self._history[base % len(self._history)]
        return tenant, known[: cut % (len(known) + 1)] + suffix or "A"

    def _remember(self, identity: Identity, text: str) -> None:
        tenant = "" if identity.tenant == PUBLIC else identity.tenant.decode()
        self._history = [*self._history[-9:], (tenant, text)]

    def _identity(self, tenant: str, prompt: str = "") -> Identity:
        """Return whose a prompt is, and whether it begins with the public prefix."""
        head, text = None, self._heads[-1] if self._heads else ""
        is_public = text and self.cache.admin.is_public(PUBLIC)
        if is_public and len(prompt) > len(text) and prompt.startswith(text):
            head = PublicPrefix(PUBLIC, len(text))
        return Identity(tenant=tenant.encode(), epoch=self.cache.manager.epoch, public_prefix=head)

    def _know_everybody(self) -> None:
        """Whoever waits may be admitted under these weights, with a head of any time."""
        for tenant in (*TENANTS, PUBLIC.decode()):
            own = self._identity(tenant)
            self.watch.know(own)
            for text in self._heads:
                self.watch.know(replace(own, public_prefix=PublicPrefix(PUBLIC, len(text))))

    def _publish(self, sequence: Sequence) -> None:
        """The head is computed, unless that went wrong: hold it, or none of it."""
        self._publisher = None
        key = PrefixKey(self._identity(PUBLIC.decode()), sequence.request.prompt_token_ids)
        receipt = self.cache.admin.publish(key)
        self.met[f"publication {receipt.status}"] += 1
        if receipt.status == LeaseStatus.ACCEPTED:
            self._heads.append("".join(map(chr, key.tokens)))
            self._know_everybody()

    def _request(self, prompt: str, identity: Identity, wish: Wish) -> Request:
        self._num_requests += 1
        images: tuple[ImageSpan, ...] = ()
        if wish.image is not None and sum(wish.image) <= len(prompt):
            images = (ImageSpan(b"cat", *wish.image),)
        request = make_request(
            f"request {self._num_requests}",
            prompt,
            images=images,
            priority=wish.priority,
            cache_read=wish.reads,
            cache_write=wish.writes,
            eos=wish.eos,
            n=wish.n,
            max_tokens=wish.max_tokens,
            prompt_logprobs=0 if wish.prompt_logprobs else None,
        )
        return replace(request, identity=identity)

    def _num_live_sequences(self) -> int:
        return sum(s.request.params.n + 1 for s in self.watch.live() if s.index == 0) + len(
            self.watch.live()
        )

    def _take(self, update: SequenceUpdate) -> None:
        if update.sequence.finish_reason is not None:
            self._end(update.sequence)

    def _cancel(self, request_id: RequestId) -> None:
        for sequence in self.scheduler.cancel(request_id):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Law 7: company, cache and mishaps change no token."""
        request_id = sequence.request.request_id
        answer, reason = self._answers[request_id][sequence.index]
        output, ended = "".join(map(chr, sequence.output)), sequence.finish_reason
        cut_short = ended in (FinishReason.ABORT, FinishReason.ERROR)
        if cut_short or sequence.stop_reason == "stop":
            assert answer.startswith(output), f"{request_id} answers {output}, not {answer}"
        else:
            assert (output, ended) == (answer, reason), f"{output} instead of {answer}"
            self.met["answers"] += 1
        self._remember(sequence.key.identity, "".join(map(chr, sequence.key.tokens)))
        self.runner.forget(sequence.sequence_id)
        self.watch.forget(sequence)
        if not any(s.request.request_id == request_id for s in self.watch.live()):
            self._requests.pop(request_id, None)
        if request_id == self._publisher:
            self._publish(sequence)
