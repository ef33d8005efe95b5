"""How are several requests read as one stream?"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ostinato.engine.outputs import RequestOutput

Outputs = AsyncGenerator[RequestOutput, None]


async def merge(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the newest output of each stream with its number, as they come.

    Raises:
        ApiError: Of the first stream that fails; the others are cancelled.

    Effects: closing it early closes all streams. A slow reader sees fewer, later outputs, which
    are cumulative, so it misses nothing.
    """
    if len(streams) == 1:  # by far the most often; spares a task
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    newest: dict[int, RequestOutput] = {}
    arrived = asyncio.Event()

    async def read(number: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    newest[number] = output
                    arrived.set()
        finally:
            arrived.set()

    readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    try:
        while newest or not all(reader.done() for reader in readers):
            await arrived.wait()
            arrived.clear()
            _raise_first(readers)
            while newest:
                yield newest.popitem()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _raise_first(readers: Sequence["asyncio.Task[None]"]) -> None:
    """Raise what the first failed reader ended with."""
    for reader in readers:
        if reader.done():
            reader.result()
