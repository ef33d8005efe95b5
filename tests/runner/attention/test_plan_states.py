"""A plan is never stale from one step to the next.

Requests join, fork, decode, compute prompts in chunks, are preempted, come back and leave; blocks
that turn out to be copies are given back for those that they copy; freed blocks are given to
others at once. After each change a step is planned by one backend, for layers with and without a
window, and each row must look at exactly the keys that are its own. Plans of the step before,
still held, must not have changed while they are read.
"""

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.native_backend import NativeAttention, NativeLimits, NativeStep
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from ostinato.runner.native.library import library
from tests.runner.attention.native_scenes import PlanView
from tests.runner.attention.test_native_plan import assert_merged, looks
from tests.support.instruction_sets import needs_library

SIZE, NUM_BLOCKS, WINDOW, GROUP = 16, 80, 40, 2
CPU = torch.device("cpu")


@dataclass
class Request:
    """What runs: its tables without and with a window, and how far it is computed."""

    full: list[int]
    windowed: list[int]
    num_computed: int
    num_new: int = 1

    def covers(self, num_tokens: int) -> bool:
        return len(self.full) * SIZE >= num_tokens


class Steps(RuleBasedStateMachine):
    """Requests over a small pool of blocks."""

    @initialize(
        read_once=st.sampled_from(["always", "auto"]),
        item_rows=st.sampled_from([4, 16, 512]),
        min_part=st.sampled_from([8.0, 512.0]),
    )
    def begin(self, read_once: Any, item_rows: int, min_part: float) -> None:
        native = library()
        assert native is not None
        sizes = NativeLimits(keys_per_run=8.0, item_rows=item_rows, min_part=min_part)
        self.backend = NativeAttention(native, read_once, sizes)
        spec = KVSpec((LayerKV(2, 2, 1),))
        self.store = self.backend.new_store(StoreShape(spec, NUM_BLOCKS, SIZE, torch.float32, CPU))
        self.free = list(range(NUM_BLOCKS))
        self.running: list[Request] = []
        self.preempted: list[int] = []
        self.held: list[tuple[PlanView, int | None, Counter[Any]]] = []

    def take(self, request: Request, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens, if there are enough."""
        wanted = -(-num_tokens // SIZE) - len(request.full)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            request.full.append(self.free.pop())
            request.windowed.append(request.full[-1])
        return True

    def give_back(self, blocks: list[int]) -> None:
        """Free what has lost its last holder; the next to ask is given it first."""
        held = {block for request in self.running for block in request.full}
        self.free += sorted(set(blocks) - held - set(self.free))

    @rule(num_tokens=st.integers(1, 150))
    def join(self, num_tokens: int) -> None:
        """A stranger, whose prompt is computed in this step."""
        request = Request([], [], 0, num_tokens)
        if len(self.running) < 9 and self.take(request, num_tokens):
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), num_blocks=st.integers(1, 9), num_new=st.integers(1, 40))
    def join_on_a_prefix(self, which: int, num_blocks: int, num_new: int) -> None:
        """A request that begins as another one does: hits in whole blocks."""
        other = self.running[which % len(self.running)]
        num_blocks = min(num_blocks, other.num_computed // SIZE)
        request = Request(other.full[:num_blocks], other.full[:num_blocks], num_blocks * SIZE)
        request.num_new = num_new
        self._release(request)
        if len(self.running) < 9 and self.take(request, request.num_computed + num_new):
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), num_children=st.integers(1, 3))
    def fork(self, which: int, num_children: int) -> None:
        """ChildIndex share all full blocks of a decoding request."""
        parent = self.running[which % len(self.running)]
        for _ in range(num_children):
            shared = parent.num_computed // SIZE
            child = Request(parent.full[:shared], parent.windowed[:shared], parent.num_computed)
            if len(self.running) < 9 and self.take(child, child.num_computed + 1):
                self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(num_steps=st.integers(1, 20))
    def go_on(self, num_steps: int) -> None:
        """All compute what they came for, then decode a token per step, as far as there is room."""
        for _ in range(num_steps):
            for request in list(self.running):
                done = request.num_computed + request.num_new
                if request in self.running and self.take(request, done + 1):
                    request.num_computed, request.num_new = done, 1
                    self._release(request)
            self.plan_is_right()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        self.give_back(self.running.pop(which % len(self.running)).full)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        """Its blocks go, and others may have them before it comes back."""
        request = self.running.pop(which % len(self.running))
        self.preempted.append(request.num_computed + request.num_new)
        self.give_back(request.full)

    @precondition(lambda self: self.preempted)
    @rule()
    def come_back(self) -> None:
        self.join(self.preempted.pop())

    @precondition(lambda self: len(self.running) > 1)
    @rule(one=st.integers(0, 99), other=st.integers(0, 99), num_blocks=st.integers(1, 9))
    def find_copies(self, one: int, other: int, num_blocks: int) -> None:
        """A request's first blocks hold what another's do: its table names those from now on."""
        mine, theirs = (self.running[which % len(self.running)] for which in (one, other))
        num_blocks = min(num_blocks, mine.num_computed // SIZE, theirs.num_computed // SIZE)
        copies = mine.full[:num_blocks]
        mine.full[:num_blocks] = theirs.full[:num_blocks]
        mine.windowed = list(mine.full)
        self._release(mine)
        self.give_back(copies)

    @precondition(lambda self: len(self.running) > 1)
    @rule(order=st.randoms(use_true_random=False))
    def change_places(self, order: Any) -> None:
        order.shuffle(self.running)

    def _release(self, request: Request) -> None:
        """The windowed table lets go of what left the window."""
        left = max(0, request.num_computed - WINDOW + 1) // SIZE
        request.windowed[:left] = [self.store.zero_block] * left

    @invariant()
    def plan_is_right(self) -> None:
        if not getattr(self, "running", None):
            return
        planned = []
        for window in (None, WINDOW):
            step, expected = self._start(window)
            plan = PlanView(step.plan(GROUP, self.store.spec.layers[0], window), SIZE)
            assert looks(plan, window) == expected
            assert_merged(plan, window)
            planned.append((plan, window, expected))
        for plan, window, expected in self.held:
            assert looks(plan, window) == expected
        self.held = planned

    def _start(self, window: int | None) -> tuple[NativeStep, Counter[Any]]:
        """Begin a step of all that run; and say what its rows must look at."""
        sequences, expected, token = [], Counter[Any](), 0
        for number, request in enumerate(self.running):
            table = request.full if window is None else request.windowed
            start, new = request.num_computed, request.num_new
            for at in range(start, start + new):
                first = 0 if window is None else max(0, at + 1 - window)
                expected.update((token, key, table[key // SIZE]) for key in range(first, at + 1))
                token += 1
            sequences.append(
                ScheduledSequence(
                    SequenceId(number), array("I", [0] * new), start, (array("I", table),)
                )
            )
        metadata = build_inputs(StepPlan(tuple(sequences)), SIZE, CPU).groups[0]
        step = self.backend.start(metadata, self.store)
        assert isinstance(step, NativeStep)
        return step, expected


TestSteps = needs_library(Steps.TestCase)
TestSteps.settings = settings(
    max_examples=max(6, settings.default.max_examples // 10), stateful_step_count=15
)
