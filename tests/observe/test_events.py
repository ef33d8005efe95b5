"""What outsiders may learn: every full block that is cached, by number, and nothing that failed."""

from array import array

import pytest

from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PublishResult
from ostinato.core.identity import Identity, ImageSpan
from ostinato.core.ids import BlockDigest
from ostinato.indexes.block_hash import BlockHasher, sha256
from ostinato.observe.event_recorder import EventRecorder
from ostinato.observe.events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventLog,
)
from tests.support.cache.cache_views import letters, prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

MINE, YOURS = Identity(tenant=b"mine"), Identity(tenant=b"yours")


def digest(name: str) -> BlockDigest:
    """A digest that can be read."""
    return BlockDigest(name.encode())


def stored(names: str, identity: Identity = MINE, group: int = 0) -> BlockStored:
    """Blocks of one token, named by their letters."""
    digests, tokens = tuple(map(digest, names)), array("I", map(ord, names))
    return BlockStored(digests, None, tokens, 1, identity, (None,) * len(names), group)


def removed(names: str, identity: Identity = MINE, group: int = 0) -> BlockRemoved:
    return BlockRemoved(tuple(map(digest, names)), identity, group)


def draw(event: Event) -> str:
    """``+AB`` for stored, ``-AB`` for removed, ``0`` for cleared; the group behind it, if any."""
    if isinstance(event, AllCleared):
        return "0"
    group = str(event.group or "")
    if isinstance(event, BlockRemoved):
        return "-" + "".join(d.decode() for d in event.digests) + group
    return "+" + letters(event.tokens) + group


def draw_log(log: EventLog, start: int = 0) -> list[str]:
    """What a replay says, a batch per text."""
    batches = log.replay(start)
    assert batches is not None
    return [f"{b.sequence}: {' '.join(map(draw, b.events))}".strip() for b in batches]


def small_log(keep: int = 10) -> EventLog:
    return EventLog(lambda: 2.5, keep)


@pytest.fixture
def log() -> EventLog:
    return small_log()


def names_of(cache: TinyCache, prompt: str, **identity: bytes) -> dict[bytes, str]:
    """The digests of a prompt's full blocks, and their letters."""
    size = cache.block_size
    digests = BlockHasher(size, sha256).digests(prefix_key(prompt, **identity), len(prompt) // size)
    return {d: prompt[i * size : (i + 1) * size] for i, d in enumerate(digests)}


def told(cache: TinyCache, *prompts: str) -> list[str]:
    """What the cache told so far, by the letters of each block."""
    known: dict[bytes, str] = {}
    for prompt in prompts:
        known |= names_of(cache, prompt)
    assert cache.prefix_cache.events is not None
    cache.prefix_cache.events.flush()
    lines = []
    for batch in cache.prefix_cache.events.replay(0) or ():
        for event in batch.events:
            if isinstance(event, AllCleared):
                lines.append("cleared")
            else:
                sign = "+" if isinstance(event, BlockStored) else "-"
                blocks = " ".join(known[d] for d in event.digests)
                lines.append(f"{batch.sequence}{sign} {blocks}")
    return lines


def watched(num_blocks: int, **settings: object) -> TinyCache:
    return tiny_cache(num_blocks, **{"keep_event_batches": 100, **settings})


# --- the log ---


def test_batches_are_numbered_from_0_without_gaps():
    """A flush of nothing takes no number."""
    log, heard = small_log(), list[EventBatch]()
    log.subscribe(heard.append)
    for names in ("A", "", "BC"):
        if names:
            log.add(stored(names))
        log.flush()
        log.flush()
    assert draw_log(log) == ["0: +A", "1: +BC"]
    assert [batch.sequence for batch in heard] == [0, 1] and log.next_sequence == 2
    assert {batch.time_s for batch in heard} == {2.5}


def test_the_newest_batches_are_kept_and_older_ones_are_known_to_be_gone():
    log = small_log(keep=2)
    for name in "ABCD":
        log.add(stored(name))
        log.flush()
    assert log.replay(1) is None
    assert draw_log(log, 2) == ["2: +C", "3: +D"]
    assert draw_log(log, 3) == ["3: +D"]
    assert draw_log(log, 4) == [] == draw_log(log, 9)


def test_what_a_failed_step_stored_was_never_heard_of(log):
    """Of a run of blocks, the first one taken back takes along those that follow."""
    log.add(stored("ABC"))
    log.add(stored("XY"))
    log.retract(MINE, [digest("C"), digest("B")], 0)
    log.retract(MINE, [digest("Y"), digest("X")], 0)
    log.flush()
    assert draw_log(log) == ["0: +A"]


def test_a_failed_step_that_only_stored_takes_no_number(log):
    log.add(stored("AB"))
    log.retract(MINE, [digest("B"), digest("A")], 0)
    log.flush()
    assert draw_log(log) == [] and log.next_sequence == 0


def test_what_was_announced_before_is_removed_when_a_failed_step_loses_its_last_copy(log):
    log.add(stored("A"))
    log.flush()
    log.retract(MINE, [digest("A")], 0)
    log.flush()
    assert draw_log(log) == ["0: +A", "1: -A"]


def test_of_two_announcements_in_a_step_the_later_one_is_taken_back(log):
    """Stored, evicted and stored again, then failed: it must not stay."""
    for event in (stored("A"), removed("A"), stored("A")):
        log.add(event)
    log.retract(MINE, [digest("A")], 0)
    log.flush()
    assert draw_log(log) == ["0: +A -A"]


def test_groups_are_taken_back_each_by_itself(log):
    log.add(stored("A"))
    log.add(stored("A", group=1))
    log.retract(MINE, [digest("A")], 1)
    log.flush()
    assert draw_log(log) == ["0: +A"]


def test_an_erased_tenant_leaves_its_batches_and_nothing_in_them(log):
    for event in (stored("A"), stored("B", YOURS), removed("A"), AllCleared()):
        log.add(event)
        log.flush()
    assert log.erase(b"mine") == 2
    assert draw_log(log) == ["0:", "1: +B", "2:", "3: 0"]
    assert log.erase(b"mine") == 0


def test_a_gap_with_an_erasure_in_it_cannot_be_replayed(log):
    """From 0 on it can: who knows nothing has nothing to forget."""
    for event in (stored("A"), stored("B", YOURS), removed("A")):
        log.add(event)
        log.flush()
    log.erase(b"mine")
    assert log.replay(1) is log.replay(2) is None
    assert draw_log(log) == ["0:", "1: +B", "2:"]
    log.add(stored("C", YOURS))
    log.flush()
    assert draw_log(log, 3) == ["3: +C"]
    assert log.erase(b"nobody") == 0
    assert draw_log(log, 3) == ["3: +C"], "nothing was erased, so nothing is missing"


def test_subscribers_are_asked_to_let_go_after_the_log_did():
    log, order = small_log(), list[str]()
    log.subscribe(lambda batch: None, lambda: order.extend(draw_log(log)))
    log.add(stored("A"))
    log.flush()
    log.erase(b"mine")
    assert order == ["0:"]


# --- the recorder ---


def test_a_cache_without_listeners_computes_no_digest():
    """The plain path pays nothing."""
    cache = tiny_cache(4)
    cache.admit("one", "ABCDEFGH")
    assert not cache.sequences["one"].table.key.digests
    assert cache.prefix_cache.stats.published_blocks == 2


def test_a_recorder_says_what_an_image_adds_to_each_block(log):
    """The third block has no image; digest, offset and length are in the extras."""
    key = prefix_key("ABCDEFGHIJKL", [ImageSpan(b"cat", 2, 4)])
    recorder = EventRecorder(log, BlockHasher(4, sha256))
    blocks = array("i", [0, 1, 2])
    table = BlockTable(key, blocks, groups=(blocks,))
    recorder.on_publish(table, 1, 3, PublishResult())
    log.flush()
    [batch] = log.replay(0)
    [event] = batch.events
    assert isinstance(event, BlockStored)
    extra = b"\3\0\0\0cat" + (-2).to_bytes(8, "little", signed=True) + (4).to_bytes(8, "little")
    assert event.extras == (extra, None)
    assert letters(event.tokens) == "EFGHIJKL"
    root = sha256(key.identity.encoded)
    first = sha256(root + key.tokens[:4].tobytes() + key.block_key(0, 4).extra)
    second = sha256(first + key.tokens[4:8].tobytes() + extra)
    assert event.parent == first
    assert event.digests == (second, sha256(second + key.tokens[8:12].tobytes()))
    assert (event.block_size, event.group) == (4, 0)


# --- the cache ---


def test_each_step_tells_what_it_stored_and_evicted(index):
    """Tails go first, so a removal names the deepest block first."""
    cache = watched(4, index=index, seal_tails=False)
    cache.serve("ABCDEFGH")
    cache.serve("ABCDWXYZ")
    cache.serve("QRSTUVWX")
    assert told(cache, "ABCDEFGH", "ABCDWXYZ", "QRSTUVWX") == [
        "0+ ABCD EFGH",
        "1+ WXYZ",
        "2- EFGH",
        "2+ QRST UVWX",
    ]


def test_a_reset_is_told_as_removals_and_a_clearing(index):
    """So that who missed something before knows everything from here on."""
    cache = watched(4, index=index)
    cache.serve("ABCDEFGH")
    cache.prefix_cache.admin.reset()
    assert told(cache, "ABCDEFGH")[-1] == "cleared"
    cache.prefix_cache.admin.reset()
    assert told(cache, "ABCDEFGH")[-2:] == ["cleared", "cleared"]


@pytest.mark.parametrize("digest", ["sha256", "xxh3_128", lambda data: b"the worst"])
def test_a_removal_names_what_was_stored_whatever_the_index_hashes_with(index, digest):
    """Outsiders get SHA-256, also of an index with a digest of this process or a bad one."""
    cache = watched(2, index=index, digest=digest, seal_tails=False)
    cache.serve("ABCDEFGH")
    cache.serve("QRSTUVWX")
    assert told(cache, "ABCDEFGH", "QRSTUVWX") == [
        "0+ ABCD EFGH",
        "1- EFGH ABCD" if index == "radix" else "1- EFGH",
        *([] if index == "radix" else ["1- ABCD"]),
        "1+ QRST UVWX",
    ]
