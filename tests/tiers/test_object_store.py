"""Object stores: values in memory by day, and servers of S3's and Azure's protocols at night."""

from collections.abc import Iterator
from itertools import count

import pytest

from ostinato.tiers import conformance
from ostinato.tiers.object_store import BucketStore
from ostinato.tiers.remote import RemoteOptions
from tests.support.object_stores import azure_container, s3_bucket
from tests.tiers.media import FaultyBucket, Server

_FOLDERS = count()


def test_a_value_that_ends_before_a_range_has_no_bytes_there():
    """A server refuses such a range; it is no fault, or three short values turn the tier off."""
    check_values(BucketStore("memory:///", 5))


@pytest.fixture(scope="module", params=[s3_bucket, azure_container], ids=["s3", "azure"])
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.param() as url:
        yield url


@pytest.mark.nightly
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_server_passes(check, bucket):
    store = FaultyBucket(f"{bucket}/{next(_FOLDERS)}", 20)
    check(Server(store, RemoteOptions(timeout_s=20)))


@pytest.mark.nightly
def test_a_server_has_no_bytes_behind_the_end_of_a_value(bucket):
    check_values(BucketStore(f"{bucket}/ranges", 20))


def check_values(store: BucketStore) -> None:
    """Put, read, list and delete a value of three bytes."""
    store.put("ostinato/value", b"123", ttl_s=1)
    ranges = [store.get("ostinato/value", start, 2) for start in (0, 2, 3, 9)]
    assert ranges == [b"12", b"3", b"", b""]
    assert store.get("ostinato/missing", 0, 2) == b""
    assert store.put("ostinato/value", b"4", ttl_s=1, only_new=True) is False
    assert list(store.keys("ostinato/")) == ["ostinato/value"]
    store.delete(["ostinato/value", "ostinato/missing"])
    assert list(store.keys("ostinato/")) == []
