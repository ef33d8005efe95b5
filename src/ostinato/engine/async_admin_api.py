"""What may an operator ask of a running engine, from an event loop?

``Administration`` does the work, between two steps; here is what has to wait for steps: for the end
of a tenant's requests before it is erased, for a prefix to be computed before it is published.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ostinato.engine.admin_api import AdminApi
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.prompts import Prompt, check_salt
from ostinato.engine.public_prefixes import salt_of_public
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.tokenizer_executor import TokenizerExecutor
from ostinato.engine.weights import WeightSource, read_weights
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseReceipt, LeaseTerms


class AsyncAdminApi:
    """The operator's side of an engine that runs in a thread."""

    def __init__(
        self, administration: AdminApi, thread: EngineThread, tokenizing: TokenizerExecutor
    ) -> None:
        """Serve an engine."""
        self._administration = administration
        self._thread = thread
        self._tokenizing = tokenizing

    async def update_weights(self, source: WeightSource) -> int:
        """Put new weights in the place of the old ones; returns the epoch."""
        update = await asyncio.to_thread(read_weights, source, self._thread.engine.loaded)
        return await self._thread.call(lambda: self._administration.update_weights(update))

    async def lease(self, prompt: Prompt, terms: LeaseTerms) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted."""
        return await self._thread.call(lambda: self._administration.lease(prompt, terms))

    async def has_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease still runs."""
        return await self._thread.call(lambda: self._thread.engine.cache.admin.has_lease(lease_id))

    async def end_lease(self, lease_id: LeaseId) -> bool:
        """Let go of a lease; returns False if there is none of that number."""
        return await self._thread.call(lambda: self._administration.end_lease(lease_id))

    async def erase(self, cache_salt: str, cancel_running: bool) -> EraseReceipt:
        """Leave nothing of a tenant, once its requests have ended."""
        check_salt(cache_salt)
        async with self._closed_to(cache_salt, cancel_running) as cancelled:
            return await self._thread.call(
                lambda: self._administration.erase(cache_salt, cancelled)
            )

    async def publish(self, name: str, prompt: Prompt) -> LeaseReceipt:
        """Compute a prefix once for several tenants, and hold it."""
        made = await self._tokenizing.do(lambda: self._administration.publishable(name, prompt))
        params = SamplingParams(max_tokens=1, detokenize=False)
        async for _ in self._thread.stream(await self._tokenizing.request(made, params, None, 0)):
            pass  # a failure is told by the receipt: then it is not cached
        return await self._thread.call(lambda: self._administration.publish(made))

    async def unpublish(self, name: str, cancel_running: bool) -> EraseReceipt:
        """Forget a public prefix, once the requests behind it have ended."""
        async with self._closed_to(salt_of_public(name), cancel_running) as cancelled:
            return await self._thread.call(lambda: self._administration.unpublish(name, cancelled))

    async def start_recording(self, path: str | Path) -> Path:
        """Record what happens from now on."""
        return await self._thread.call(lambda: self._administration.start_recording(path))

    async def stop_recording(self) -> Path | None:
        """End the recording and return where it is; None if none runs."""
        return await self._thread.call(self._administration.stop_recording)

    @asynccontextmanager
    async def _closed_to(self, salt: str | bytes, cancel_running: bool) -> AsyncIterator[int]:
        """Refuse a tenant's requests for a while, and wait for the end of those there are.

        Yields:
            How many of them were cancelled.
        """
        thread, engine = self._thread, self._thread.engine
        # Not waited for: whoever gives up in between must leave the tenant open.
        thread.commands.put(lambda: engine.block_tenant(salt))
        try:
            cancelled = 0
            if cancel_running:
                cancelled = await thread.call(lambda: thread.cancel_all(salt))
            while await thread.call(lambda: engine.requests_of(salt)):
                await asyncio.sleep(0)  # the answer comes between steps: one question per step
            yield cancelled
        finally:
            thread.tell(lambda: engine.unblock_tenant(salt))
