"""Object stores: values in memory by day, and a server of S3's protocol at night."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import count

import pytest

from ostinato.tiers import conformance
from ostinato.tiers.object_store import BucketStore
from ostinato.tiers.remote import RemoteOptions
from tests.tiers.media import FaultyBucket, Server

_FOLDERS = count()
S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def test_a_value_that_ends_before_a_range_has_no_bytes_there():
    """A server refuses such a range; it is no fault, or three short values turn the tier off."""
    store = BucketStore("memory:///", 5)
    store.put("ostinato/value", b"123", ttl_s=1)
    assert [store.get("ostinato/value", start, 2) for start in (0, 2, 3, 9)] == [
        b"12", b"3", b"", b"",
    ]  # fmt: skip
    assert store.get("ostinato/missing", 0, 2) == b""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server in a process of its own; its address is in the environment."""
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    command = [sys.executable, "-c", S3_SERVER]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert process.stdout
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        make = urllib.request.Request(f"{endpoint}/bucket", method="PUT", data=b"")
        urllib.request.urlopen(make).close()
        yield "s3://bucket"
        process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_server_of_s3_passes(check, bucket):
    store = FaultyBucket(f"{bucket}/{next(_FOLDERS)}", 20)
    check(Server(store, RemoteOptions(timeout_s=20)))


@pytest.mark.nightly
def test_a_value_of_s3_that_ends_before_a_range_has_no_bytes_there(bucket):
    store = BucketStore(f"{bucket}/ranges", 20)
    store.put("ostinato/value", b"123", ttl_s=1)
    assert [store.get("ostinato/value", start, 2) for start in (0, 2, 3, 9)] == [
        b"12", b"3", b"", b"",
    ]  # fmt: skip
    assert store.put("ostinato/value", b"4", ttl_s=1, only_new=True) is False
    assert list(store.keys("ostinato/")) == ["ostinato/value"]
    store.delete(["ostinato/value", "ostinato/missing"])
    assert list(store.keys("ostinato/")) == []
