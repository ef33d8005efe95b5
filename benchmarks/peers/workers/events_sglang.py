"""Record the KV events of SGLang's radix cache for ``tests/router/data``, with what it then finds.

::

    python -m benchmarks.peers.workers.events_sglang UNPACKED sglang.msgpack

``UNPACKED`` is its wheel (``install.sh FOLDER sglang``). The tree and the classes that write events
are its own; the memory behind it is a list of pages.
"""

import random
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo
import torch._inductor.utils
import transformers  # noqa: F401 - real ones, before anything stands in

from benchmarks.peers.workers import stand_ins

PAGE, NUM_PAGES = 16, 48
NUM_REQUESTS = 90


class Pages:
    """Free pages, as the tree gives them back."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        """All are free."""
        self.free_pages = list(range(NUM_PAGES))

    def free(self, slots: Any) -> None:
        """Take pages back, by the slots of their tokens."""
        self.free_pages += sorted({int(slot) // PAGE for slot in slots})

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        """Likewise."""
        self.free(slots)

    def alloc(self, num_pages: int) -> Any:
        """Return the slots of so many pages."""
        pages = [self.free_pages.pop() for _ in range(num_pages)]
        return torch.tensor([p * PAGE + i for p in pages for i in range(PAGE)], dtype=torch.int64)


def main(unpacked: str, out: str) -> None:
    """Serve growing conversations in a small cache, clear it once, and write all down."""
    rooms = stand_ins.COMPUTING
    stand_ins.COMPUTING = tuple(r for r in rooms if not r.endswith("disaggregation"))
    sys.path.insert(0, unpacked)
    sys.meta_path.insert(0, stand_ins.StandIns())
    import sglang.version
    from sglang.srt.disaggregation.kv_events import KVEventBatch
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    pages, batches, requests = Pages(), list[list[Any]](), list[dict[str, Any]]()
    tree = RadixCache.create_simulated(
        mock_allocator=pages, page_size=PAGE, enable_kv_cache_events=True
    )
    chance = random.Random(5)
    systems = [[chance.randrange(10, 30_000) for _ in range(40)] for _ in range(3)]
    talks = [list(systems[number % 3]) for number in range(6)]
    for turn in range(NUM_REQUESTS):
        if turn == 60:
            tree.reset()
            pages.free_pages = list(range(NUM_PAGES))
        number = chance.randrange(6)
        if len(talks[number]) > 230:
            talks[number] = list(systems[number % 3])
        prompt = talks[number]
        prompt += [chance.randrange(10, 30_000) for _ in range(chance.randrange(8, 34))]
        prompt += [11] * (len(prompt) % PAGE == 0)
        if events := tree.take_events():
            batch = msgspec.msgpack.encode(KVEventBatch(ts=1000.0 + turn, events=events))
            batches.append([len(batches), batch])
        ids = array("q", prompt)
        key = RadixKey(ids, limit=len(ids) - 1)
        node = tree.match_prefix(base.MatchPrefixParams(key=key)).last_device_node
        known = tree.path_device_indices(node)
        row = {"batches": len(batches), "prompt": list(prompt), "salt": ""}
        requests.append({**row, "cached": len(known)})
        missing = (len(ids) - len(known)) // PAGE
        tree.inc_lock_ref(node)
        if missing > len(pages.free_pages):
            num_tokens = (missing - len(pages.free_pages)) * PAGE
            tree.evict(base.EvictParams(num_tokens=num_tokens))
        value = torch.cat([known, pages.alloc(missing)])
        tree.insert(base.InsertParams(key=RadixKey(ids).page_aligned(PAGE), value=value))
        tree.dec_lock_ref(node)
    engine = f"sglang {sglang.version.__version__}"
    recorded = {"engine": engine, "batches": batches, "requests": requests}
    Path(out).write_bytes(msgspec.msgpack.encode(recorded))


if __name__ == "__main__":
    main(*sys.argv[1:])
