"""Every tier passes the same suite, and a storm of faults."""

import pytest

from ostinato.testing import conformance
from ostinato.tiers.remote import RemoteOptions
from tests.tiers.media import (
    SEALED,
    SECRET,
    FaultyBucket,
    HostMemory,
    LocalDisk,
    Server,
    SimulatedDisk,
)

SEALED_REMOTE = RemoteOptions(sealed=True, secret=SECRET)
MEDIA = {
    "simulated disk": lambda path: SimulatedDisk(),
    "sealed disk": lambda path: SimulatedDisk(SEALED),
    "disk": LocalDisk,
    "host memory": lambda path: HostMemory(),
    "sealed host memory": lambda path: HostMemory(SEALED),
    "server": lambda path: Server(),
    "sealed server": lambda path: Server(options=SEALED_REMOTE),
    "object store": lambda path: Server(FaultyBucket("memory:///", 5)),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_every_tier_passes(check, medium, tmp_path):
    check(MEDIA[medium](tmp_path / "tier"))


@pytest.mark.parametrize(
    "medium", ["simulated disk", "sealed disk", "host memory", "server", "sealed server"]
)
def test_a_storm_of_faults_brings_no_wrong_byte(medium, tmp_path):
    report = conformance.storm(MEDIA[medium](tmp_path), num_faults=100)
    assert report.num_blocks > 300 and len(report.by_fault) == 6


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("medium", MEDIA)
def test_a_long_storm_of_faults_brings_no_wrong_byte(medium, seed, tmp_path):
    """10,200 faults over all media."""
    report = conformance.storm(MEDIA[medium](tmp_path / "tier"), num_faults=850, seed=seed)
    assert report.num_blocks > 5000
