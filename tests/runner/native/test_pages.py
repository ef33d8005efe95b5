"""Memory for keys and values is taken from the kernel before it is written."""

import mmap
import platform
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ostinato.runner.huge_pages import PAGE_BYTES
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from ostinato.runner.native import store
from ostinato.runner.native.library import library
from ostinato.runner.native.store import SPAN, TOKENS_AT_START, Area, NativeKVStore, PagesAhead
from tests.support.instruction_sets import needs_library

SHAPE = StoreShape(KVSpec((LayerKV(1, 32, 32),)), 8, 16, torch.bfloat16)
LINUX = tuple(int(part) for part in platform.release().split(".")[:2])
pytestmark = pytest.mark.skipif(LINUX < (5, 14), reason="the kernel cannot be asked for pages")


@pytest.fixture
def mapping() -> Iterator[np.ndarray]:
    """Five huge pages' worth of untouched memory."""
    memory = mmap.mmap(-1, 5 * PAGE_BYTES + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield np.frombuffer(memory, dtype=np.uint8)


def resident_bytes(content: np.ndarray) -> int:
    """How much of a mapping has pages, as the kernel says."""
    address, inside, found = content.ctypes.data, False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word = line.split()[0]
            if "-" in word and not word.endswith(":"):
                low, high = (int(part, 16) for part in word.split("-"))
                inside = low <= address < high
            elif inside and word == "Rss:":
                found += int(line.split()[1]) * 1024
    return found


def pages_of(mapping: np.ndarray, num_parts: int = 1) -> PagesAhead:
    """Rows of 256 bytes: a huge page has 8,192 of them."""
    areas = [Area(mapping.ctypes.data, len(mapping), num_parts)]
    return PagesAhead(areas, len(mapping) // num_parts // 256)


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_all_pages_of_the_first_slots_are_taken(mapping, num_parts):
    before = resident_bytes(mapping)
    ahead = pages_of(mapping, num_parts)

    ahead.begin(len(mapping))
    ahead.wait()

    assert resident_bytes(mapping) - before >= len(mapping) - 4096
    assert not mapping.any()


def test_of_each_part_no_more_is_taken_than_its_beginning(mapping):
    before = resident_bytes(mapping)  # the kernel joins mappings that are neighbours
    ahead = pages_of(mapping)

    ahead.begin(16)
    ahead.wait()

    assert 0 < resident_bytes(mapping) - before <= 2 * PAGE_BYTES


def test_a_store_below_a_huge_page_has_no_thread(mapping):
    ahead = pages_of(mapping[:4096])

    ahead.begin(16)

    assert "ostinato-pages" not in {thread.name for thread in threading.enumerate()}


def test_pages_are_taken_before_the_slots_that_are_written_reach_them(mapping):
    """Five huge pages of 8,192 slots: one span ahead of the highest slot, and no more."""
    before = resident_bytes(mapping)
    ahead = pages_of(mapping)

    taken = []
    for slot in (0, 1, SPAN, SPAN + 1, 4 * SPAN):
        ahead.reach(slot)
        ahead.wait()
        taken.append((resident_bytes(mapping) - before) // PAGE_BYTES)

    assert taken[1] <= taken[0] + 1 <= 3, "a huge page may begin before the mapping"
    assert taken == sorted(taken) and taken[-1] >= 3
    assert not mapping.any()


def test_the_thread_does_not_rest_while_steps_are_close_behind_it(mapping, monkeypatch):
    """Pages begin at slots 0, 8,192 and 16,384, and are asked for early, or late."""
    monkeypatch.setattr(store, "REST", 1e9)  # who rests is there until the end
    ahead = pages_of(mapping[-mapping.ctypes.data % PAGE_BYTES :][: 4 * PAGE_BYTES])

    for slot in (0, SPAN + SPAN // 2 + 1, 2 * SPAN):
        ahead.reach(slot)
        ahead.wait()

    ahead = pages_of(mapping[-mapping.ctypes.data % PAGE_BYTES :][: 4 * PAGE_BYTES])
    ahead.reach(SPAN // 4 + 1)
    [resting] = (t for t in threading.enumerate() if t.name == "ostinato-pages")
    resting.join(0.1)
    assert resting.is_alive()
    ahead.close()


def test_nothing_is_taken_ahead_of_a_closed_store(mapping):
    ahead = pages_of(mapping)
    before = resident_bytes(mapping)

    ahead.close()
    ahead.begin(SPAN)
    ahead.reach(0)
    ahead.wait()

    assert resident_bytes(mapping) == before


class SlowKernel:
    """Brings a page once ``gate`` is open."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def madvise(self, *_: int) -> int:
        self.entered.set()
        self.gate.wait(60)
        return 0


def test_a_store_that_goes_waits_for_the_page_that_is_being_taken(mapping, monkeypatch):
    """Or the kernel would be asked for pages of memory that belongs to something else by then."""
    kernel = SlowKernel()
    monkeypatch.setattr(store, "memory_calls", lambda: kernel)
    ahead = pages_of(mapping)
    ahead.begin(SPAN)
    assert kernel.entered.wait(60)

    opening = threading.Timer(0.05, kernel.gate.set)
    opening.start()
    ahead.close()

    assert kernel.gate.is_set()
    assert "ostinato-pages" not in {thread.name for thread in threading.enumerate()}


def test_memory_that_cannot_be_had_ahead_is_a_warning(caplog):
    """Who writes there waits for the kernel, as without this."""
    ahead = PagesAhead([Area(2**46, PAGE_BYTES, 1)], PAGE_BYTES // 256)

    ahead.reach(0)
    ahead.wait()

    assert "no memory for the next keys and values" in caplog.text


@needs_library
def test_a_store_has_pages_taken_ahead_of_the_highest_slot_of_a_step(monkeypatch):
    reached: list[int] = []
    monkeypatch.setattr(PagesAhead, "reach", lambda _, slot: reached.append(slot))
    store = NativeKVStore(library(), SHAPE)

    store.check_slots(np.array([5, 70, 6]))
    store.check_slots(np.array([], dtype=np.int64))

    assert reached == [70]


@needs_library
def test_a_store_takes_the_pages_of_its_first_tokens_from_the_start(monkeypatch):
    begun: list[int] = []
    monkeypatch.setattr(PagesAhead, "begin", lambda _, num_slots: begun.append(num_slots))

    NativeKVStore(library(), SHAPE)

    assert begun == [TOKENS_AT_START]


@needs_library
def test_keys_and_values_are_kept_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch):
    """As on macOS, whose ``mmap`` does not know the word."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")

    store = NativeKVStore(library(), SHAPE)

    assert store.num_slots >= 128
