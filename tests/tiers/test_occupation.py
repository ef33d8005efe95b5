"""Limits of tiers, measured from outside: what the file system and the process really hold."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.testing.conformance_medium import NAMESPACE, conversation, put
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.disk.host_memory import MemoryFolder
from ostinato.tiers.port import LoadFault, StoreResult

PAGE = resource.getpagesize()
OPTIONS = DiskOptions(limit_bytes=8 * 4 * PAGE, segment_bytes=4 * PAGE)


def held_bytes(folder: Path) -> int:
    """Return what the file system keeps for segments: in the folder, and open in this process."""
    paths = {*folder.glob("*.segment")}
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(folder) in os.readlink(link):
            paths.add(link)
    files = {(x.st_dev, x.st_ino): x.st_blocks * 512 for x in map(os.stat, paths)}
    return sum(files.values())


def deleted_files(folder: Path) -> list[str]:
    """Return the removed files of a folder that this process still has open."""
    links = [os.readlink(x) for x in Path("/proc/self/fd").iterdir() if x.is_symlink()]
    return [x for x in links if x.startswith(str(folder)) and x.endswith("(deleted)")]


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
def test_a_disk_holds_no_more_than_its_limit_while_references_of_look_ups_are_kept(
    tmp_path: Path, sealed: bool
):
    """A request that waits for room in the pool keeps its references, and no evicted file."""
    tier = DiskTier(tmp_path / "kv", replace(OPTIONS, sealed=sealed))
    kept = []
    for number in range(120):
        put(tier, conversation(number))
        kept.append((conversation(number), tier.look_up(conversation(number), 0)))
        assert held_bytes(tmp_path / "kv") <= OPTIONS.limit_bytes
    assert tier.stats()[0].num_evicted > 50
    assert deleted_files(tmp_path / "kv") == []
    result = tier.load(kept[0][1][-1], memoryview(bytearray(4 * 64)), 4, float("inf"))
    assert (result.num_blocks, result.fault) == (0, LoadFault.STALE)
    tier.close()


def test_host_memory_holds_no_more_than_its_limit():
    """Eight times the limit goes through it; the process grows by the limit and a segment."""
    limit, width = 64 << 20, 1 << 20
    options = DiskOptions(limit_bytes=limit)
    tier = DiskTier(MemoryFolder(options.max_segment_bytes), options, name="host")
    namespace = replace(NAMESPACE, block_bytes=width)
    block, before = bytes(range(256)) * (width // 256), resident_bytes()
    for number in range(8 * limit // width):
        prefix = conversation(number + 1, 3, namespace=namespace)
        assert tier.store([(prefix.extent(2, 1), block)]) == [StoreResult.STORED]
    assert tier.stats()[0].num_evicted > 400
    assert resident_bytes() - before < limit + 2 * options.max_segment_bytes
    tier.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
