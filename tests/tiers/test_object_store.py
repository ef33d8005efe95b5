"""Object stores: values in memory by day, and servers of S3's and Azure's protocols at night."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from ostinato.testing import conformance
from ostinato.testing.conformance_medium import conversation, put
from ostinato.tiers.port import StoreResult
from ostinato.tiers.remote import RemoteOptions, RemoteTier
from ostinato.tiers.remote.object_store import BucketStore
from tests.support.servers.store_servers import azure_container, s3_bucket
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


class MissingBucket(BaseHTTPRequestHandler):
    """Answers every request of S3's protocol as for a bucket that does not exist."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b"<Error><Code>NoSuchBucket</Code></Error>"
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def missing_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), MissingBucket)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    yield "s3://wrong"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_bucket_that_does_not_exist_is_told_in_one_line(missing_bucket: str, caplog):
    """Every look-up there is a miss, as in an empty bucket: the first write tells."""
    tier = RemoteTier(BucketStore(missing_bucket, 20), RemoteOptions(timeout_s=20))
    for _ in range(2):
        assert put(tier, conversation(1)) == [StoreResult.READ_ONLY] * 2
    assert not tier.erase(b"")[0].complete
    tier.close()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "takes no writes for now: there is no such bucket: " in warning and "\n" not in warning
