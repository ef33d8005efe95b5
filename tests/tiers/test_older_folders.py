"""Folders that earlier versions wrote: read, leased, erased and continued by this one.

``before_windows.zip`` was written by the last version without windows and states: a folder in
the clear and a sealed one, each with 32 tokens of two tenants in two records, one of them leased.
"""

import hashlib
from array import array
from pathlib import Path
from zipfile import ZipFile

import pytest

from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.port import Namespace, Prefix, StoreResult

NAMESPACE = Namespace(b"weights", b"config", "bfloat16", "layout-1", 4, 64, ("full",))
WRITTEN_S = 1_750_000_000.0
LEASE_END_S = 4_000_000_000.0


def conversation(tenant: bytes, num_tokens: int = 32) -> Prefix:
    """Return tokens of which the folders hold the first 32; not derived from any other test."""
    return Prefix(NAMESPACE, tenant, array("I", range(100, 100 + num_tokens)))


def content(prefix: Prefix) -> bytes:
    """Return the bytes that were stored for a prefix."""
    return b"".join(hashlib.shake_128(digest).digest(64) for digest in prefix.digests)


def load(tier: DiskTier, prefix: Prefix) -> bytes:
    """Return what a tier has of a prefix."""
    blocks = bytearray()
    for ref in tier.look_up(prefix, 0):
        part = bytearray(ref.num_blocks * ref.block_bytes)
        assert tier.load(ref, memoryview(part), ref.num_blocks, float("inf")).fault is None
        blocks += part
    return bytes(blocks)


@pytest.fixture(params=["clear", "sealed"])
def tier(request: pytest.FixtureRequest, tmp_path: Path):
    with ZipFile(Path(__file__).with_name("before_windows.zip")) as archive:
        archive.extractall(tmp_path)
    options = DiskOptions(1 << 18, sealed=request.param == "sealed", segment_bytes=16384)
    tier = DiskTier(tmp_path / request.param, options, clock=lambda: WRITTEN_S + 60)
    yield tier
    tier.close()


def test_its_records_are_found_and_have_the_bytes_that_were_stored(tier: DiskTier, caplog):
    for tenant in (b"ann", b"bob"):
        assert load(tier, conversation(tenant)) == content(conversation(tenant))
    [stats] = tier.stats()
    assert (stats.num_extents, stats.num_blocks, stats.num_damaged) == (4, 16, 0)
    assert load(tier, conversation(b"eve")) == b""
    assert caplog.text == ""


def test_its_leases_go_on(tier: DiskTier):
    [ref, *_] = tier.look_up(conversation(b"bob"), 0)
    assert (ref.keep_until, ref.refresh_s) == (LEASE_END_S, 3600.0)
    assert tier.look_up(conversation(b"ann"), 0)[0].keep_until == 0


def test_it_is_continued_and_erased_by_tenant(tier: DiskTier):
    longer = conversation(b"ann", 48)
    assert tier.store([(longer.extent(8, 4), content(longer)[512:])]) == [StoreResult.STORED]
    assert load(tier, longer) == content(longer)
    [receipt] = tier.erase(b"ann")
    assert (receipt.num_extents, receipt.complete) == (3, True)
    assert load(tier, longer) == b""
    assert load(tier, conversation(b"bob")) == content(conversation(b"bob"))
