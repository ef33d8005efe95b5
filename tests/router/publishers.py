"""Workers' events as vLLM and SGLang put them on the wire, over real sockets."""

from typing import Any

import msgspec
import zmq
import zmq.asyncio

BLOCK = 4


class FakePublisher:
    """An XPUB socket and a ROUTER that replays, as vLLM's documentation describes them.

    Attributes:
        events: Endpoint of the XPUB socket.
        replay: Endpoint of the ROUTER socket.
        kept: Batches that can be replayed, by number.
    """

    def __init__(self) -> None:
        """Bind to free ports."""
        context = zmq.asyncio.Context.instance()
        self._live, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._live.bind("tcp://127.0.0.1:0")
        self._router.bind("tcp://127.0.0.1:0")
        self.events = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept: dict[int, bytes] = {}
        self.next = 0

    async def wait_for_subscriber(self) -> None:
        """Wait until a subscription is there: it misses nothing that is published afterwards."""
        await self._live.recv()

    async def publish(self, *events: Any, is_lost: bool = False) -> None:
        """Send a batch, or lose it on the way."""
        payload = msgspec.msgpack.encode([float(self.next), list(events), None])
        self.kept[self.next] = payload
        if not is_lost:
            await self.send(self.next, payload)
        self.next += 1

    async def send(self, number: int, payload: bytes) -> None:
        """Send a message as it is."""
        await self._live.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def answer_replays(self) -> None:
        """Replay kept batches on request, until cancelled."""
        while True:
            client, empty, start = await self._router.recv_multipart()
            for number in sorted(self.kept):
                if number >= int.from_bytes(start, "big"):
                    frames = [client, empty, number.to_bytes(8, "big"), self.kept[number]]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, empty, b"\xff" * 8, b""])

    def close(self) -> None:
        """Close both sockets."""
        self._live.close(linger=0)
        self._router.close(linger=0)


def of_vllm(text: str, first: int = 0) -> list[Any]:
    """Return the event that stores a prompt's blocks from one on, as vLLM writes it."""
    names, tokens = _blocks(text, bytes)
    parent = names[first - 1] if first else None
    tokens = tokens[first * BLOCK :]
    return ["BlockStored", names[first:], parent, tokens, BLOCK, None, "GPU", None, None, 0]


def of_sglang(text: str) -> dict[str, Any]:
    """Return the event that stores a prompt's blocks as SGLang writes it: a map, hashes int64."""
    names, tokens = _blocks(text, int)
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": None,
    }


def _blocks(text: str, kind: type) -> tuple[list[Any], list[int]]:
    texts = [text[: at + BLOCK] for at in range(0, len(text) // BLOCK * BLOCK, BLOCK)]
    names = [each.encode() if kind is bytes else hash(each) for each in texts]
    return names, [ord(letter) for letter in text[: len(texts) * BLOCK]]
