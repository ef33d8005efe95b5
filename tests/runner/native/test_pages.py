"""When is memory for keys and values taken from the kernel?"""

import mmap
import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ostinato.core.errors import ConfigError
from ostinato.runner.huge_pages import PAGE_BYTES
from ostinato.runner.kv.kv_store import KVSpec, LayerKV
from ostinato.runner.native import store as store_file
from ostinato.runner.native.library import library
from ostinato.runner.native.pages import SPAN, Area, PagesAhead, take_pages
from ostinato.runner.native.store import NativeKVStore
from tests.support.instruction_sets import needs_library

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


def whole(mapping: np.ndarray, num_parts: int = 1) -> Area:
    return Area(mapping.ctypes.data, len(mapping), num_parts, len(mapping) // num_parts + 1)


@pytest.mark.parametrize("num_parts", [1, 3, 8])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_pages_are_taken_where_there_is_time(mapping, num_parts, num_threads):
    before = resident_bytes(mapping)

    taken = take_pages([whole(mapping, num_parts)], num_threads, 60)

    assert taken >= len(mapping)
    assert resident_bytes(mapping) - before >= len(mapping) - 4096
    assert not mapping.any()


def test_of_each_part_no_more_is_taken_than_its_beginning(mapping):
    before = resident_bytes(mapping)  # the kernel joins mappings that are neighbours

    take_pages([Area(mapping.ctypes.data, len(mapping), 1, 4096)], 2, 60)

    assert resident_bytes(mapping) - before <= 2 * PAGE_BYTES


def test_nothing_is_taken_once_time_is_up(mapping):
    assert take_pages([whole(mapping)], 2, 0) == 0


def test_memory_that_cannot_be_had_is_an_error(mapping):
    """The kernel answers ENOMEM for what it cannot bring, here because nothing is mapped there."""
    with pytest.raises(MemoryError, match="bytes"):
        take_pages([Area(2**46, PAGE_BYTES, 1, PAGE_BYTES)], 2, 60)


def test_pages_are_taken_before_the_slots_that_are_written_reach_them(mapping):
    """Five huge pages of 8,192 slots: one span ahead of the highest slot, and no more."""
    before = resident_bytes(mapping)
    ahead = PagesAhead([Area(mapping.ctypes.data, len(mapping), 1, 0)], len(mapping) // 256, 0)

    taken = []
    for slot in (0, 1, SPAN, SPAN + 1, 4 * SPAN):
        ahead.reach(slot)
        ahead.wait()
        taken.append((resident_bytes(mapping) - before) // PAGE_BYTES)

    assert taken[1] <= taken[0] + 1 <= 3, "a huge page may begin before the mapping"
    assert taken == sorted(taken) and taken[-1] >= 3
    assert not mapping.any()


def test_nothing_is_taken_ahead_of_a_closed_store(mapping):
    ahead = PagesAhead([Area(mapping.ctypes.data, len(mapping), 1, 0)], len(mapping) // 256, 0)
    before = resident_bytes(mapping)

    ahead.close()
    ahead.reach(0)
    ahead.wait()

    assert resident_bytes(mapping) == before


def test_memory_that_cannot_be_had_ahead_is_a_warning(caplog):
    """Who writes there waits for the kernel, as without this."""
    ahead = PagesAhead([Area(2**46, PAGE_BYTES, 1, 0)], PAGE_BYTES // 256, 0)

    ahead.reach(0)
    ahead.wait()

    assert "no memory for the next keys and values" in caplog.text


@needs_library
def test_a_store_whose_pages_are_not_to_be_had_names_the_settings(monkeypatch):
    def refuse(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(store_file, "take_pages", refuse)
    spec = KVSpec((LayerKV(2, 8, 8),))

    with pytest.raises(ConfigError, match=r"num_blocks=4 .* lower num_blocks or kv_cache_memory"):
        NativeKVStore(library(), spec, 4, 16, torch.bfloat16)


@needs_library
def test_a_store_has_pages_taken_ahead_of_the_highest_slot_of_a_step(monkeypatch):
    reached: list[int] = []
    monkeypatch.setattr(PagesAhead, "reach", lambda _, slot: reached.append(slot))
    store = NativeKVStore(library(), KVSpec((LayerKV(1, 32, 32),)), 8, 16, torch.bfloat16)

    store.check_slots(np.array([5, 70, 6]))
    store.check_slots(np.array([], dtype=np.int64))

    assert reached == [70]


@needs_library
def test_a_store_says_what_it_took(caplog):
    spec = KVSpec((LayerKV(2, 64, 64),) * 3)

    with caplog.at_level("INFO"):
        NativeKVStore(library(), spec, 500, 16, torch.bfloat16)

    assert any("for keys and values taken in" in message for message in caplog.messages)


@needs_library
def test_keys_and_values_are_kept_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch):
    """As on macOS, whose ``mmap`` does not know the word."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")

    store = NativeKVStore(library(), KVSpec((LayerKV(1, 32, 32),)), 4, 16, torch.float32)

    assert store.num_slots >= 64
