"""The disk tier: leases, limits, permissions, and disks that fill up or vanish."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import xxhash

from ostinato.core.errors import ConfigError
from ostinato.testing.conformance_medium import (
    NAMESPACE,
    assert_nowhere,
    conversation,
    get,
    payload,
    put,
)
from ostinato.testing.simulated_disk import SimulatedFile, SimulatedFolder
from ostinato.tiers.chain import TierChain
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.disk.limits import DailyBudget
from ostinato.tiers.folder import LocalFolder
from ostinato.tiers.port import LoadFault, Prefix, StoreResult, TierListener
from ostinato.tiers.record import ALIGNMENT, MAGIC, RecordLease, lease_slot
from ostinato.tiers.remote import RemoteTier
from tests.tiers.media import SEALED, SEGMENTS, ServerInMemory

DAY = 86_400.0
SMALL = DiskOptions(limit_bytes=64 * 1024, segment_bytes=8 * 1024)
clear_or_sealed = pytest.mark.parametrize(
    "options", [SMALL, replace(SMALL, sealed=True)], ids=["clear", "sealed"]
)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def fill(tier, first=0, count=80, talk=conversation):
    for number in range(first, first + count):
        put(tier, talk(number))


@clear_or_sealed
def test_a_lease_survives_evictions_and_restarts_and_ends_by_wall_clock_time(options):
    folder, clock, prefix = SimulatedFolder(), Clock(), conversation(1)
    tier = DiskTier(folder, options, clock)
    put(tier, prefix)
    assert tier.lease(prefix, clock.now + DAY) == 32

    fill(tier, 100)
    folder = folder.after_kill()
    tier = DiskTier(folder, options, clock)
    fill(tier, 200)
    assert get(tier, prefix) == 8
    assert {ref.keep_until for ref in tier.look_up(prefix, 0)} == {clock.now + DAY}
    assert tier.stats()[0].leased_bytes > 8 * NAMESPACE.block_bytes

    clock.now += DAY + 1
    tier = DiskTier(folder.after_kill(), options, clock)
    fill(tier, 300, 200)
    assert get(tier, prefix, start_block=4) == 0, "what nobody else shares is gone"
    assert tier.stats()[0].leased_bytes == 0


def test_terms_of_a_lease_survive_restarts_and_older_folders_keep_their_leases():
    """How long each use keeps it is found again; before, a record had the end alone."""
    folder, prefix, ending = SimulatedFolder(), conversation(1), Clock.now + DAY
    tier = DiskTier(folder, SMALL, Clock())
    put(tier, prefix)
    tier.lease(prefix, ending, refresh_s=300.0)
    folder = folder.after_kill()
    tier = DiskTier(folder, SMALL, Clock())
    assert {(x.keep_until, x.refresh_s) for x in tier.look_up(prefix, 0)} == {(ending, 300.0)}

    file, turn, older = folder.open("000000000001.segment"), 2, ending + 0.5
    for start in [i for i in range(len(file.content)) if file.content.startswith(MAGIC, i)]:
        salt = bytes(file.content[start + 128 : start + 144])
        check = xxhash.xxh32_intdigest(salt + struct.pack("<Id", turn, older))
        place, _ = lease_slot(RecordLease(turn), salt)
        file.write([struct.pack("<IId", turn, check, older)], start + place)
    tier = DiskTier(folder.after_kill(), SMALL, Clock())
    assert {(x.keep_until, x.refresh_s) for x in tier.look_up(prefix, 0)} == {(older, 0.0)}


@pytest.mark.parametrize("kind", ["tail", "blocks", "header", "segment"])
def test_damage_is_told_once_and_a_torn_end_is_not(kind: str, caplog: pytest.LogCaptureFixture):
    """What was durable and is not whole is named by file and offset, also in the last group."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, SMALL)
    put(tier, conversation(1), blocks_each=8)
    put(tier, conversation(2), blocks_each=8)
    file = folder.open("000000000001.segment")
    second = bytes(file.content).index(MAGIC, 512 + 1)
    if kind == "tail":  # killed in the middle of a third
        folder.faults.fail_after = 700
        put(tier, conversation(3))
    else:
        file.content[{"blocks": -300, "header": second + 20, "segment": 10}[kind]] ^= 1

    folder = folder.after_kill()
    stats = DiskTier(folder, SMALL).stats()[0]
    assert stats.num_damaged == (kind != "tail")
    told = [record.getMessage() for record in caplog.records if "damaged" in record.message]
    assert len(told) == stats.num_damaged
    if told:
        place = 0 if kind == "segment" else second
        assert f"000000000001.segment is damaged, {len(file.content) - place} bytes from" in told[0]
        assert f"from byte {place} on" in told[0]
    caplog.clear()
    tier = DiskTier(folder.after_kill(), SMALL)
    assert tier.stats()[0].num_damaged == 0 and not caplog.records
    assert get(tier, conversation(1)) == (0 if kind == "segment" else 8)
    assert get(tier, conversation(2)) == {"tail": 8, "segment": 0}.get(kind, 2)


def test_a_segment_that_was_torn_in_its_first_bytes_is_removed():
    folder = SimulatedFolder({"000000000001.segment": bytearray(b"OSTKVSG")})
    assert put(DiskTier(folder, SMALL), conversation(1))[0] is StoreResult.STORED
    assert folder.num_bytes() > 512


def test_leases_that_fill_the_disk_refuse_stores_until_they_end():
    clock = Clock()
    tier = DiskTier(SimulatedFolder(), SMALL, clock)
    results = list[StoreResult]()
    for number in range(60):
        prefix = conversation(number)
        extent = prefix.extent(0, 8, keep_until=clock.now + 10)
        results += tier.store([(extent, payload(prefix, 0, 8))])
    assert results[0] is StoreResult.STORED and results[-1] is StoreResult.FULL
    assert get(tier, conversation(0)) == 8
    clock.now += 11
    assert put(tier, conversation(99))[-1] is StoreResult.STORED


def test_a_folder_that_is_removed_makes_the_tier_read_only_and_says_so(tmp_path: Path):
    """A removed file still takes writes, but no restart would find them."""
    tier = DiskTier(tmp_path / "kv", SEGMENTS)
    put(tier, conversation(1))
    shutil.rmtree(tmp_path / "kv")
    assert set(put(tier, conversation(2))) == {StoreResult.READ_ONLY}
    stats = tier.stats()[0]
    assert (stats.state, stats.reason) == ("read-only", "the folder or its files were removed")
    assert get(tier, conversation(1)) == 8
    assert get(tier, conversation(2), start_block=4) == 0
    tier.close()


class Announced(TierListener):
    """Blocks that a consumer of reports believes to be on the disk."""

    def __init__(self) -> None:
        self.digests = set[bytes]()

    def on_stored(self, tier, extent):
        self.digests.update(extent.digests)

    def on_removed(self, tier, digests):
        self.digests.difference_update(digests)


def test_a_listener_knows_what_is_stored_and_evicted():
    listener = Announced()
    tier = DiskTier(SimulatedFolder(), SMALL, listener=listener)
    fill(tier, 0)
    assert tier.stats()[0].num_evicted > 0
    assert len(listener.digests) == tier.stats()[0].num_blocks
    for number in range(80):
        prefix = conversation(number)
        num_found = sum(ref.num_blocks for ref in tier.look_up(prefix, 0))
        assert listener.digests.issuperset(prefix.digests[:num_found])


def test_what_is_found_again_and_again_is_not_evicted():
    tier = DiskTier(SimulatedFolder(), SMALL)
    put(tier, conversation(1))
    for number in range(100, 200):
        put(tier, conversation(number))
        assert get(tier, conversation(1)) == 8
    assert tier.stats()[0].num_evicted > 50


def test_the_limit_holds_when_it_is_lowered_between_two_runs():
    folder = SimulatedFolder()
    fill(DiskTier(folder, SEGMENTS), 0, 150)
    assert folder.num_bytes() > SMALL.limit_bytes
    tier = DiskTier(folder, SMALL)
    assert folder.num_bytes() <= SMALL.limit_bytes
    fill(tier, 500, 20)
    assert folder.num_bytes() <= SMALL.limit_bytes and get(tier, conversation(519)) == 8


def test_bytes_per_day_bound_what_is_written_also_over_a_restart():
    clock, folder = Clock(), SimulatedFolder()
    options = replace(SEGMENTS, bytes_per_day=20_000)
    fill(tier := DiskTier(folder, options, clock), 0, 50)
    assert tier.stats()[0].stores["budget"] > 0
    assert 10_000 < tier.stats()[0].written_bytes <= 20_000
    assert put(DiskTier(folder, options, clock), conversation(99))[-1] is StoreResult.BUDGET
    clock.now += DAY / 2
    assert put(tier, conversation(98)) == [StoreResult.STORED] * 2


def test_copies_of_what_is_kept_count_as_written():
    """A disk that evicts: all that its segments ever took, headers left out, is in the budget."""
    folder, clock = SimulatedFolder(), Clock()
    tier = DiskTier(folder, replace(SMALL, bytes_per_day=300_000), clock)
    fill(tier, 0, 400)
    stats = tier.stats()[0]
    assert stats.num_evicted > 50 and stats.stores["budget"] > 0
    assert 250_000 < stats.written_bytes <= 300_000
    num_segments = int(max(folder.files).partition(".")[0])
    assert stats.written_bytes > 0.9 * num_segments * (SMALL.segment_bytes - 2 * 512) - 8192


def test_a_budget_comes_back_in_the_course_of_a_day():
    clock = Clock()
    budget = DailyBudget(1000, clock)
    budget.spend(1000)
    assert not budget.allows(1)
    clock.now += DAY / 4
    assert budget.allows(250) and not budget.allows(251)


def test_a_full_disk_makes_the_tier_read_only_with_one_warning(caplog):
    folder = SimulatedFolder()
    tier = DiskTier(folder, SEGMENTS)
    put(tier, conversation(1))
    folder.faults.fail_after = 0
    with caplog.at_level(logging.WARNING):
        for number in range(2, 6):
            assert set(put(tier, conversation(number))) == {StoreResult.READ_ONLY}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "kv_disk='simulated' is read-only"
    ]
    assert tier.stats()[0].state == "read-only" and "space" in tier.stats()[0].reason
    assert get(tier, conversation(1)) == 8


def test_a_disk_that_vanished_turns_the_tier_off(caplog):
    folder = SimulatedFolder()
    tier = DiskTier(folder, SEGMENTS)
    put(tier, conversation(1))
    ref = tier.look_up(conversation(1), 0)[0]
    folder.faults.read_errno = 5
    with caplog.at_level(logging.WARNING):
        faults = [tier.load(ref, memoryview(bytearray(512)), 4, 1e12).fault for _ in range(5)]
    assert faults == [LoadFault.IO] * 5 and len(caplog.records) == 1
    assert tier.look_up(conversation(1), 0) == [] and tier.stats()[0].state == "off"


def test_files_are_the_users_alone(tmp_path):
    tier = DiskTier(tmp_path / "kv", SEALED)
    put(tier, conversation(1))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").iterdir()}
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert set(modes) == {"000000000001.segment", "keys", "lock", "secret"}
    assert set(modes.values()) == {0o600}
    tier.close()


def test_a_folder_that_became_read_only_is_still_read(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path / "kv", SEGMENTS)
    put(tier, conversation(1))
    tier.close()

    def refuse(path, mode):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", refuse)
    tier = DiskTier(tmp_path / "kv", SEGMENTS)
    assert get(tier, conversation(1)) == 8
    assert set(put(tier, conversation(2))) == {StoreResult.READ_ONLY}
    assert get(tier, conversation(1)) == 8
    tier.close()


def test_a_second_process_and_a_strangers_folder_are_refused_by_name(tmp_path):
    tier = DiskTier(tmp_path / "kv", SEGMENTS)
    with pytest.raises(ConfigError, match=r"in use by process \d+: give each engine a folder"):
        DiskTier(tmp_path / "kv", SEGMENTS)
    tier.close()
    DiskTier(tmp_path / "kv", SEGMENTS).close()
    (tmp_path / "kv" / "thesis.tex").write_text("work of years")
    with pytest.raises(ConfigError, match=r"holds 'thesis.tex'"):
        DiskTier(tmp_path / "kv", SEGMENTS)


def test_a_limit_without_room_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kv_disk_bytes=1000: must hold 4 segments"):
        DiskTier(tmp_path / "kv", DiskOptions(limit_bytes=1000))


def test_a_folder_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path):
    LocalFolder(tmp_path / "kv").close()
    newer = tmp_path / "kv" / "000000000001.segment"
    newer.write_bytes(b"OSTKVSG2" + bytes(1000))
    with pytest.raises(ConfigError, match="format b'2'"):
        DiskTier(tmp_path / "kv", SEGMENTS)
    assert newer.read_bytes()[:8] == b"OSTKVSG2"


def test_what_was_erased_since_the_look_up_is_stale():
    tier = DiskTier(SimulatedFolder(), SEGMENTS)
    put(tier, conversation(1))
    ref = tier.look_up(conversation(1), 0)[0]
    tier.erase(b"")
    result = tier.load(ref, memoryview(bytearray(512)), 4, time.monotonic() + 60)
    assert (result.num_blocks, result.fault) == (0, LoadFault.STALE)


def test_a_chain_continues_in_the_next_tier_where_the_first_has_lost_something():
    disk, remote = DiskTier(SimulatedFolder(), SEGMENTS), RemoteTier(ServerInMemory())
    tiers = TierChain([disk, remote])
    assert put(tiers, conversation(1)) == [StoreResult.STORED] * 2
    assert [ref.tier for ref in tiers.look_up(conversation(1), 0)] == ["disk", "disk"]
    disk.erase(b"")
    put(disk, replace(conversation(1), tokens=conversation(1).tokens[:16]))
    assert [ref.tier for ref in tiers.look_up(conversation(1), 0)] == ["disk", "remote"]
    assert get(tiers, conversation(1)) == 8
    assert [receipt.tier for receipt in tiers.erase(b"")] == ["disk", "remote"]
    assert get(tiers, conversation(1)) == 0


def unreadable(file: SimulatedFile) -> None:
    """Let every read of a file fail, as those of bad sectors do."""

    def fail(into: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    file.read = fail


def apart(number: int) -> Prefix:
    """Return a conversation that shares no block with any other."""
    return conversation(number, tenant=b"%d" % number)


def test_an_unreadable_segment_is_dropped_and_stores_go_on(caplog):
    """Its records cannot be copied when it is evicted: they are counted, and nothing is refused."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, SMALL)
    fill(tier, 0, 20)
    tier.lease(conversation(1), time.time() + DAY)
    with caplog.at_level(logging.WARNING):
        bad = min(name for name in folder.files if "segment" in name)
        unreadable(folder.files[bad])
        results = {x for number in range(100, 500) for x in put(tier, conversation(number))}
    assert results <= {StoreResult.STORED, StoreResult.PRESENT}
    assert bad not in folder.files and tier.stats()[0].num_damaged > 0
    [warning] = [record.getMessage() for record in caplog.records]
    assert (
        f"simulated/{bad} cannot be read: Input/output error: what it holds is dropped" in warning
    )
    assert tier.stats()[0].state == "on"


def test_loads_from_an_unreadable_segment_miss_and_the_others_are_read():
    """A disk is off after three failed reads, but not for those of one segment among others."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, SMALL)
    fill(tier, count=40, talk=apart)
    unreadable(folder.files[max(folder.files)])
    into = memoryview(bytearray(8 * NAMESPACE.block_bytes))
    refs = [(number, tier.look_up(apart(number), 0)) for number in range(40)]
    for _ in range(5):
        for _, found in refs[-4:]:
            tier.load(found[-1], into, 1, time.monotonic() + 60)
    assert tier.stats()[0].loads["io"] > 3 and tier.stats()[0].state == "on"
    assert len(tier.look_up(apart(39), 0)) < len(refs[-1][1]), "it is not looked up again"
    assert sum(get(tier, apart(number)) == 8 for number in range(40)) > 5


def test_a_start_drops_an_unreadable_segment_and_refuses_a_disk_without_a_readable_one(caplog):
    folder = SimulatedFolder()
    fill(DiskTier(folder, SMALL), count=20, talk=apart)
    folder = folder.after_kill()
    names = [name for name in folder.names() if "segment" in name]
    unreadable(folder.files[names[0]])
    tier = DiskTier(folder, SMALL)
    assert names[0] not in folder.names() and tier.stats()[0].num_damaged == 1
    assert f"{names[0]} cannot be read: Input/output error" in caplog.text
    assert get(tier, apart(19)) == 8
    folder = folder.after_kill()
    for name in names[1:]:
        unreadable(folder.files[name])
    with pytest.raises(ConfigError, match="Input/output error: make it readable"):
        DiskTier(folder, SMALL)


@pytest.mark.parametrize("kind", ["damaged", "cut off", "removed"])
def test_sealed_records_whose_keys_are_lost_are_told_once_and_evicted_first(kind: str, caplog):
    """Two tenants lose their keys, or all three; what the others have is found."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, SEALED)
    for number in range(3):
        put(tier, conversation(number, tenant=b"%d" % number))
    if kind == "removed":
        folder.replace("keys", None)
    else:
        keys = bytearray(folder.open("keys").content)
        keys[10] ^= 1
        keys[128 + 10] ^= 1
        folder.replace("keys", keys if kind == "damaged" else keys[256:])
    caplog.clear()
    tier = DiskTier(folder.after_kill(), SEALED)
    num_lost = 3 if kind == "removed" else 2
    [warning] = [record.getMessage() for record in caplog.records]
    expected = f"the file keys has lost the keys of {num_lost} tenants: their {2 * num_lost} sealed"
    assert expected in warning
    found = [get(tier, conversation(number, tenant=b"%d" % number)) for number in range(3)]
    assert found == [0, 0, 0 if kind == "removed" else 8]


def test_a_lost_secret_is_told(caplog):
    folder = SimulatedFolder()
    put(DiskTier(folder, SEALED), conversation(1))
    folder.replace("secret", b"half")
    caplog.clear()
    assert get(DiskTier(folder.after_kill(), SEALED), conversation(1)) == 0
    assert "simulated/secret is missing or damaged: all sealed records are lost" in caplog.text


def test_the_first_start_with_sealing_warns_of_nothing(caplog):
    """Nor does one whose tenants are all erased: no record is lost with the secret."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, SEALED)
    put(tier, conversation(1))
    tier.erase(b"")
    folder.replace("secret", None)
    assert get(DiskTier(folder.after_kill(), SEALED), conversation(1)) == 0
    assert caplog.text == ""


@clear_or_sealed
def test_an_erasure_frees_the_segments_that_held_nothing_else(options, caplog):
    """Also the one that is written to; the tier goes on, and a restart finds no damage."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, options)
    for number in range(30):
        put(tier, conversation(number, tenant=b"a"))
    [before] = tier.stats()
    [receipt] = tier.erase(b"a")
    [after] = tier.stats()
    assert receipt.complete and receipt.num_bytes > 0.9 * before.num_bytes
    assert [len(x.content) for name, x in folder.files.items() if "segment" in name] == [ALIGNMENT]
    assert after.num_bytes == ALIGNMENT
    put(tier, conversation(1, tenant=b"b"))
    tier = DiskTier(folder.after_kill(), options)
    assert get(tier, conversation(1, tenant=b"b")) == 8
    assert caplog.text == ""


def test_a_segment_that_others_share_is_kept_when_a_tenant_is_erased():
    folder = SimulatedFolder()
    tier = DiskTier(folder, SMALL)
    for number in range(20):
        put(tier, conversation(number, tenant=b"ab"[number % 2 :][:1]))
    held = [n for n in range(20) if get(tier, conversation(n, tenant=b"b")) == 8]
    tier.erase(b"a")
    tier = DiskTier(folder.after_kill(), SMALL)
    assert held and all(get(tier, conversation(number, tenant=b"b")) == 8 for number in held)


def test_an_erasure_hides_at_once_and_syncs_by_the_segment():
    """None of 150 records is found while they are overwritten."""
    folder = SimulatedFolder()
    tier = DiskTier(folder, replace(SEGMENTS, limit_bytes=1 << 20))
    for number in range(150):
        put(tier, apart(number), blocks_each=8)
    erased = [replace(apart(number), public_prefix=b"public") for number in range(150, 300)]
    for prefix in erased:
        put(tier, prefix, blocks_each=8)
    syncs, num_segments = list[str](), sum("segment" in name for name in folder.files)

    def note(name: str, sync: Callable[[], None]) -> None:
        assert all(not tier.look_up(prefix, 0) for prefix in erased[::50]), "hidden at once"
        syncs.append(name)
        sync()

    for name, file in folder.files.items():
        file.sync = partial(note, name, file.sync)
    [receipt] = tier.erase(b"public")
    assert (receipt.num_extents, receipt.complete) == (150, True)
    assert receipt.num_bytes > 150 * 8 * NAMESPACE.block_bytes
    assert 3 < len(syncs) <= 3 * num_segments < 75
    assert_nowhere(erased[0], [bytes(file.content) for file in folder.files.values()])


@pytest.mark.parametrize("options", [SEGMENTS, SEALED], ids=["clear", "sealed"])
def test_an_erasure_that_fails_hides_everything_and_the_next_completes_it(options):
    """Neither the rest of a full disk nor a restart brings back what was hidden."""
    folder, prefixes = SimulatedFolder(), [conversation(n, tenant=b"a") for n in range(30)]
    tier = DiskTier(folder, options)
    for prefix in prefixes:
        put(tier, prefix)
    folder.faults.fail_after = 3000
    assert not tier.erase(b"a")[0].complete
    assert [get(tier, prefix) for prefix in prefixes] == [0] * 30
    folder.faults.fail_after = None
    [receipt] = tier.erase(b"a")
    assert receipt.complete and receipt.num_bytes > 20 * 8 * NAMESPACE.block_bytes
    for prefix in prefixes:
        assert_nowhere(prefix, [bytes(file.content) for file in folder.files.values()])


class MacOS:
    """Its system calls, of which ``fcntl`` may be refused, and which were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.calls = 0, list[str]()
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", self._fcntl)
        monkeypatch.delattr(os, "fdatasync", raising=False)
        monkeypatch.setattr(os, "fsync", lambda fd: self.calls.append("fsync"))

    def _fcntl(self, fd: int, command: int) -> None:
        self.calls.append(f"fcntl {command}")
        if self.code:
            raise OSError(self.code, "refused")


def test_macos_is_told_to_empty_the_memory_of_the_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There, ``fsync`` returns when the disk has the bytes; a file and its folder need more."""
    folder = LocalFolder(tmp_path / "tier")
    macos = MacOS(monkeypatch)
    file = folder.create("000000000001.segment")
    assert macos.calls == ["fcntl 51"]
    file.sync()
    assert macos.calls == ["fcntl 51"] * 2


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL, errno.EIO])
def test_on_a_file_system_without_f_fullfsync_fsync_has_to_be_enough(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Shares of a network, on macOS, which has no ``fdatasync`` either; other errors are raised."""
    file = LocalFolder(tmp_path / "tier").create("000000000001.segment")
    macos = MacOS(monkeypatch)
    macos.code = code
    if code == errno.EIO:
        with pytest.raises(OSError, match=r"Errno 5"):
            file.sync()
    else:
        file.sync()
    assert macos.calls == ["fcntl 51", "fsync"][: 1 if code == errno.EIO else 2]


def test_what_the_finder_leaves_in_a_folder_is_no_foreign_file(tmp_path: Path):
    (tmp_path / ".DS_Store").touch()
    folder = LocalFolder(tmp_path)
    folder.create("000000000001.segment")

    assert folder.names() == ["000000000001.segment", "lock"]
