"""A disk tier that is killed, or whose machine loses power, at any byte of what it writes."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.testing.conformance_medium import assert_nowhere, conversation, get, put
from ostinato.testing.simulated_disk import Killed, SimulatedFolder
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.disk.index import ExtentIndex
from ostinato.tiers.disk.segment_log import SegmentLog
from ostinato.tiers.port import StoreResult
from ostinato.tiers.record import ALIGNMENT

OPTIONS = DiskOptions(limit_bytes=40 * 1024, segment_bytes=8 * 1024)
SEALED = DiskOptions(limit_bytes=40 * 1024, segment_bytes=8 * 1024, sealed=True)
NOW = 1_000_000.0


def open_tier(folder: SimulatedFolder, options: DiskOptions) -> DiskTier:
    return DiskTier(folder, options, clock=lambda: NOW)


def talk(number: int):
    return conversation(number, num_blocks=6, tenant=b"%d" % (number % 3))


def live(
    folder: SimulatedFolder,
    options: DiskOptions,
    rng: random.Random,
    first: int,
    erases: bool = True,
) -> list[int]:
    """Store, load, lease and erase until the process is killed; returns what was stored last."""
    durable = list[int]()
    try:
        tier = open_tier(folder, options)
        for number in range(first, first + 60):
            if put(tier, talk(number), blocks_each=3) == [StoreResult.STORED] * 2:
                durable.append(number)
            if rng.random() < 0.3:  # used: worth keeping when its segment is evicted
                get(tier, talk(rng.randint(first, number)))
            if rng.random() < 0.1:
                tier.lease(talk(number), NOW + 1)
            if rng.random() < 0.05 and erases:
                tier.erase(b"1")
            assert folder.num_bytes() <= options.limit_bytes, "more bytes than the limit"
    except Killed:
        pass
    return [number for number in durable[-3:] if number % 3 != 1]


def check(folder: SimulatedFolder, options: DiskOptions, durable: list[int], first: int) -> int:
    """Open what a crash has left: every byte is right, accounted for, and within the limit."""
    tier = open_tier(folder, options)
    found = [number for number in range(first, first + 160) if get(tier, talk(number)) == 6]
    for number in durable:  # of their shared root others may have been the owner
        assert get(tier, talk(number), start_block=2) == 4, "a store that had returned is lost"
    num_bytes = tier.stats()[0].num_bytes
    assert folder.num_bytes() == num_bytes <= options.limit_bytes, "bytes that nothing counts"
    for segment in SegmentLog(folder, OPTIONS, ExtentIndex(), lambda: NOW).segments:
        end = ALIGNMENT
        for offset, header in segment.headers():
            assert offset == end, "bytes between records"
            end = offset + header.total_bytes
        assert end == segment.file.size()
    assert all(tier.erase(b"%d" % tenant)[0].complete for tenant in range(3))
    for number in found + durable:
        assert_nowhere(talk(number), [bytes(x.content) for x in folder.files.values()])
    return len(found)


def crash(seed: int, options: DiskOptions) -> int:
    rng, folder, first = random.Random(seed), SimulatedFolder(), 1000 * seed
    folder.faults.kill_after = rng.randrange(60_000)
    erases = seed % 4 > 0  # an interrupted erasure looks like damage, and nothing else does
    durable = live(folder, options, rng, first, erases)
    folder = folder.after_power_loss(rng) if seed % 2 else folder.after_kill()
    segments = {*folder.names()}
    if seed % 3 == 0:  # the next process is killed as well, while it recovers or soon after
        folder.faults.kill_after = rng.randrange(3000)
        durable += live(folder, options, rng, first + 100, erases)
        folder = folder.after_kill()
    tier = open_tier(folder, options)
    assert erases or not tier.stats()[0].num_damaged, "a torn end is no damage"
    tier.close()
    if not segments <= {*folder.names()}:  # a crash in an eviction: the next start evicts as well
        durable = []
    return check(folder, options, durable, first)


@pytest.mark.parametrize("options", [OPTIONS, SEALED], ids=["clear", "sealed"])
def test_a_crash_at_any_byte_leaves_no_wrong_and_no_lost_byte(options):
    """Kills and power losses in stores, leases, evictions, erasures and recoveries."""
    assert sum(crash(seed, options) for seed in range(50)) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("options", [OPTIONS, SEALED], ids=["clear", "sealed"])
def test_a_thousand_crashes_leave_no_wrong_and_no_lost_byte(options):
    assert sum(crash(seed, options) for seed in range(50, 1050)) > 2000


ENGINE = """
import sys
from pathlib import Path
from tests.tiers.test_crashes import OPTIONS, DiskTier, conversation, put
tier = DiskTier(sys.argv[1], OPTIONS)
for number in range(10**6):
    put(tier, conversation(number))
    print(number, flush=True)
"""


def test_what_a_process_stored_before_sigkill_is_there(tmp_path):
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "kv")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(30):
            last = int(process.stdout.readline())
        process.kill()
    tier = DiskTier(tmp_path / "kv", OPTIONS)
    assert [get(tier, conversation(number)) for number in (last - 1, last)] == [8, 8]
    tier.close()
