"""Sequences of one search: they fork between two tokens, end, and go on together."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import RequestError
from ostinato.core.ids import RequestId
from ostinato.core.plan import CopyRun, SampledToken, SequenceResult, StepResult
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence as Sequence_
from ostinato.sched.sequence import SequenceUpdate
from ostinato.settings import IndexName, PrefixCacheConfig
from tests.support.cache.fake_kv import Chunk, FakeKV, spell
from tests.support.cache.tiny_scheduler import make_request


def mark(text: str) -> int:
    """Return what is sampled behind a text: its fingerprint, so that a search can tell them."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 9973


class ScriptedSearch:
    """Chooses rows by a script, and checks that each sample is of the text that it chose.

    A step of the script is a list of rows, such as ``[0, 0, 1]``; rows that there are not are
    taken modulo the rows that there are. What follows a row is another letter for each.
    """

    def __init__(self, prompt: str, width: int, script: Sequence[Sequence[int]]) -> None:
        self.width, self.texts, self.seen = width, [prompt], list[list[str]]()
        self._script = iter(script)

    def choose(self, samples: Sequence[SampledToken]) -> list[tuple[int, int]]:
        assert [sample.token_id for sample in samples] == [mark(text) for text in self.texts]
        rows = [row % len(samples) for row in next(self._script, ())][: self.width]
        chosen = [(row, ord("a") + place) for place, row in enumerate(rows)]
        self.seen.append(self.texts)
        self.texts = [self.texts[row] + chr(token) for row, token in chosen]
        return chosen


class Searching:
    """A scheduler, its cache and text in place of keys and values; checked after every call."""

    def __init__(self, num_blocks: int = 24, seats: int = 8, **settings) -> None:
        budget = settings.pop("budget", 64)
        config = PrefixCacheConfig(num_blocks=num_blocks, block_size=4, **settings)
        clock = lambda: 0.0  # noqa: E731
        self.cache = build_cache(config, clock)
        limits = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seats)
        self.scheduler = build_scheduler(limits, self.cache, clock)
        self.kv, self.fails = FakeKV(config), False
        self.ended: list[Sequence_] = []
        self.num_rows = 0
        self.copies: tuple[CopyRun, ...] = ()

    def add(self, name: str, prompt: str, width: int = 1, script=None, **how) -> ScriptedSearch:
        search = ScriptedSearch(prompt, width, script or ())
        request = make_request(name, prompt, **{"max_tokens": 5, **how})
        if script is not None:
            request = replace(request, search=search)
        self.scheduler.add(request, (0,))
        return search

    def step(self) -> list[SequenceUpdate]:
        plan = self.scheduler.plan()
        self.check()
        if not plan.sequences:
            return []
        live = {s.sequence_id: s for every in self.requests.live.values() for s in every}
        chunks = [
            Chunk(s.sequence_id, s.tables, spell(live[s.sequence_id].key), s.start, s.end)
            for s in plan.sequences
        ]
        self.num_rows += sum(chunk.end - chunk.start for chunk in chunks)
        self.copies = plan.copies
        self.kv.write(chunks, plan.copies, self.fails)
        if self.fails:
            self.fails = False
            updates = self.scheduler.fail()
            for update in updates:
                self.scheduler.cancel(update.sequence.request.request_id)
        else:
            results = []
            for chunk, scheduled in zip(chunks, plan.sequences, strict=True):
                self.kv.read(chunk)
                text = chunk.texts[chunk.end - 1].partition(":")[2]
                sample = SampledToken(mark(text))
                results.append(SequenceResult((sample,) if scheduled.sample else ()))
            updates = self.scheduler.commit(StepResult(tuple(results)))
        self.ended += [u.sequence for u in updates if u.sequence.finish_reason is not None]
        self.check()
        return updates

    def run(self) -> None:
        for _ in range(400):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "it never ends"
        assert not self.requests.running and not self.requests.waiting
        self.check()

    @property
    def requests(self):
        return self.scheduler.requests

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds."""
        return len({b for s in self.requests.running for b in s.table.blocks})

    def check(self) -> None:
        """Pool, index and tables agree, and every live sequence is in one place."""
        self.cache.check()
        live = [s for every in self.requests.live.values() for s in every]
        assert len({s.sequence_id for s in live}) == len(live), "a number twice"
        for sequence in self.requests.running:
            assert sequence in live and sequence not in self.requests.waiting
            assert sequence.table.key is sequence.key


def test_a_beam_that_goes_on_twice_is_forked_and_its_last_block_copied():
    """Six tokens of prompt in blocks of four: the fork copies two slots, and shares a block."""
    searching = Searching()
    search = searching.add("one", "ABCDEF", 2, [[0, 0], [0, 1], []])

    searching.step()
    searching.step()

    assert [run.num_tokens for run in searching.copies] == [2]

    first, second = searching.requests.live[RequestId("one")]
    assert first.table.blocks[0] == second.table.blocks[0]
    assert first.table.blocks[1] != second.table.blocks[1]
    searching.run()
    assert search.seen == [["ABCDEF"], ["ABCDEFa", "ABCDEFb"], ["ABCDEFaa", "ABCDEFbb"]]


def test_the_prompt_is_computed_once_and_each_beam_a_token_per_step():
    searching = Searching()

    searching.add("one", "ABCDEFGH", 3, [[0, 0, 0], [0, 1, 2], [2, 2, 0], []])
    searching.run()

    assert searching.num_rows == 8 + 3 + 3 + 3
    assert searching.scheduler.stats.num_steps == 4


def test_a_beam_that_dies_frees_its_blocks_at_once():
    """Of three beams with a block each one goes on: two blocks are free before the next step."""
    searching = Searching()
    searching.add("one", "ABCD", 3, [[0, 0, 0], [1], [0], []])
    searching.step()
    searching.step()

    assert searching.num_held == 2

    searching.step()
    assert searching.num_held == 2
    assert [str(s.finish_reason) for s in searching.ended] == ["stop", "stop"]
    searching.run()


def test_beams_keep_numbers_next_to_their_request():
    """A request that comes later goes behind all forks, also behind those made after it came."""
    searching = Searching()
    searching.add("one", "ABCD", 3, [[0, 0, 0], [0, 0, 0], []])
    searching.step()
    searching.add("two", "WXYZ")
    searching.step()

    numbers = {s.sequence_id for s in searching.requests.live[RequestId("one")]}
    [two] = searching.requests.live[RequestId("two")]
    assert numbers == {0, 1, 2}
    assert two.sequence_id == 3


def test_cancelling_a_search_leaves_nothing():
    """Between choosing and forking, when forks have neither blocks nor a place in the queue."""
    searching = Searching()
    searching.add("one", "ABCDEF", 4, [[0, 0, 0, 0], []])
    searching.step()

    ended = searching.scheduler.cancel(RequestId("one"))

    assert {s.finish_reason for s in ended} == {FinishReason.ABORT}
    assert len(ended) == 4
    searching.step()
    searching.run()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_ends_the_search_and_frees_its_blocks(failing: int):
    searching = Searching()
    searching.add("one", "ABCDEF", 4, [[0, 0, 0, 0], [3, 3, 1, 1], []])
    for _ in range(failing - 1):
        searching.step()

    searching.fails = True
    searching.step()

    assert not searching.scheduler.has_work
    searching.run()


def test_a_sample_that_fails_ends_all_beams():
    searching = Searching()
    searching.add("one", "ABCDEF", 2, [[0, 0], [0, 1], []])
    searching.step()
    plan = searching.scheduler.plan()
    bad = SequenceResult((SampledToken(0, error="NaN"),))
    good = SequenceResult((SampledToken(mark("ABCDEFa")),))

    updates = searching.scheduler.commit(StepResult((good, bad)[: len(plan.sequences)]))

    assert [u.sequence.finish_reason for u in updates] == [FinishReason.ERROR] * 2
    assert not searching.scheduler.has_work
    searching.check()


def test_beams_that_do_not_fit_the_pool_together_take_turns():
    """Four beams of up to four blocks each, and a pool of five blocks."""
    searching = Searching(num_blocks=5)
    rows = [[0, 0, 0, 0]] + [[0, 1, 2, 3]] * 9
    search = searching.add("one", "ABCDEF", 4, [*rows, []])

    searching.run()

    assert len(search.seen) == 11
    assert searching.scheduler.stats.num_preemptions > 0


def test_two_searches_that_hold_each_others_blocks_both_end():
    searching = Searching(num_blocks=6)
    rows = [[0, 0, 0]] + [[0, 1, 2]] * 8
    searches = [searching.add(name, name * 5, 3, [*rows, []]) for name in "AB"]

    searching.run()

    assert [len(search.seen) for search in searches] == [10, 10]


def test_more_beams_than_seats_are_refused():
    searching = Searching(seats=4)

    with pytest.raises(RequestError, match="5 beams: at most max_num_seqs=4"):
        searching.add("one", "ABC", 5, [[0]])


def test_a_reset_between_two_tokens_lets_all_beams_wait():
    searching = Searching()
    search = searching.add("one", "ABCDEFG", 3, [[0, 0, 0], [2, 2, 1], [0, 1, 2], []])
    searching.step()
    searching.step()

    searching.scheduler.preempt_all()
    searching.cache.admin.reset()
    searching.check()

    searching.run()
    assert len(search.seen) == 4


rows = st.lists(st.integers(0, 5), min_size=1, max_size=5)
events = st.lists(
    st.one_of(
        st.tuples(st.just("search"), st.integers(1, 5), st.lists(rows, max_size=8)),
        st.tuples(st.just("plain"), st.integers(0, 3)),
        st.sampled_from([("step",), ("step",), ("step",), ("fail",), ("cancel",), ("preempt",)]),
    ),
    max_size=24,
)


@given(events, st.integers(5, 20), st.sampled_from([6, 64]), st.sampled_from(get_args(IndexName)))
def test_whatever_happens_no_block_leaks_and_each_beam_reads_its_own_text(
    events, num_blocks: int, budget: int, index: IndexName
):
    """An oracle holds each beam's text; slots hold the text that they were computed from."""
    searching = Searching(num_blocks=num_blocks, index=index, budget=budget, seats=5)
    draw = random.Random(len(events))
    for number, (kind, *values) in enumerate(events):
        name = str(number)
        if kind == "search":
            searching.add(name, "ABCDEFGH"[: 1 + number % 8], values[0], [*values[1], []])
        elif kind == "plain":
            searching.add(name, "ABCDEFGH"[: 1 + values[0]])
        elif kind in ("step", "fail"):
            searching.fails = kind == "fail"
            searching.step()
            searching.fails = False
        elif kind == "cancel" and searching.requests.live:
            searching.scheduler.cancel(draw.choice([*searching.requests.live]))
            searching.check()
        elif kind == "preempt":
            searching.scheduler.preempt_all()
            searching.check()

    searching.run()
