"""What operators do with an engine, always between steps.

* lease: keep a prefix, pinned or for a time, as hosted APIs offer it;
* publish: let several tenants share a prefix;
* erase: remove everything of a tenant, down to the keys and values;
* new weights: see ``weights``;
* recordings: see ``recorder``.

``AsyncAdminApi`` has the calls that wait for steps: for the end of a tenant's requests before it
is erased, for a prefix to be computed before it is published.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato.core.identity import PrefixKey
from ostinato.engine.api.engine_thread import EngineThread
from ostinato.engine.api.tokenizer_executor import TokenizerExecutor
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.public_prefixes import salt_of_public
from ostinato.engine.requests.prompts import Prompt, check_salt
from ostinato.engine.requests.request_validation import tokenize
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.weights import WeightUpdate
from ostinato.engine.tiers.tiered_cache import WAIT_S
from ostinato.errors import CacheInUse, ConfigError, EmptyPrompt, RequestError
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseReceipt, LeaseStatus, LeaseTerms


class AdminApi:
    """Administers one engine; called between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def lease(self, prompt: Prompt, terms: LeaseTerms) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted; as ``LLM.lease``."""
        prompt = self._engine.prompts.with_placeholders(prompt)
        tokens, _, images = self._engine.prompts.placed(prompt, self._tokens(prompt))
        if not tokens:
            raise EmptyPrompt("a lease needs at least one token: the prompt is empty")
        identity = self._engine.identities.of_prompt(prompt, tokens, images)
        key, recorder = PrefixKey(identity, tokens, images), self._engine.recorder
        recorder.tick()
        receipt = self._engine.cache.admin.lease(key, terms)
        recorder.on_leased(key, terms, receipt.lease_id)
        if self._engine.tiers is not None and receipt.lease_id is not None:
            self._engine.tiers.lease(key, receipt.num_tokens, terms)
        return receipt

    def end_lease(self, lease_id: LeaseId) -> bool:
        """End a lease; returns False if there is none of that number."""
        self._engine.recorder.tick()
        tiers, admin = self._engine.tiers, self._engine.cache.admin
        tables = [x.table for x in admin.leases() if tiers and x.lease_id == lease_id]
        ended = admin.end_lease(lease_id)
        if ended and tiers is not None:
            for table in tables:
                tiers.stores.set_lease_end(table.key, table.num_computed, 0.0)
        self._engine.recorder.on_lease_ended(lease_id)
        return ended

    def publishable(self, name: str, prompt: Prompt) -> Prompt:
        """Return the whole blocks of a prompt, as the prompt that computes them for publication.

        Raises:
            RequestError: It is not a prompt of this model, fills no block, or the name is taken.
        """
        if prompt.images:
            raise RequestError("a public prefix is text: publish what comes before the first image")
        prompt = self._engine.prompts.tokenized(prompt)
        tokens = self._tokens(prompt)
        whole = self._engine.public_prefixes.whole_blocks(name, tokens)
        known, num_left = prompt.known, len(tokens) - len(whole)
        head = None if known is None else known.head(len(known) - num_left)
        return Prompt(token_ids=whole, publishes=name, known=head)

    def publish(self, prompt: Prompt) -> LeaseReceipt:
        """Hold a prefix for all tenants that may read it.

        Args:
            prompt: As ``publishable`` returned it, after a request has computed it.

        Returns:
            Accepted or rejected, with the reason.

        Raises:
            RequestError: Another prefix was published under that name meanwhile.
        """
        name, engine = prompt.publishes, self._engine
        assert name is not None, "a prompt to be published has a name"
        tokens = engine.public_prefixes.whole_blocks(name, self._tokens(prompt))
        key = PrefixKey(engine.identities.of_prompt(prompt, tokens), tokens)
        engine.recorder.tick()
        receipt = engine.cache.admin.publish(key)
        engine.recorder.on_published(key)
        if receipt.status is LeaseStatus.ACCEPTED:
            engine.public_prefixes.add(name, tokens)
            if prompt.known is not None and engine.texts is not None:
                engine.texts.known.note(salt_of_public(name), prompt.known)
        return receipt

    def unpublish(self, name: str, num_cancelled: int = 0) -> EraseReceipt:
        """Remove a public prefix, and what all tenants computed after it; as ``erase``.

        Raises:
            RequestError: There is none of that name.
            CacheInUse: Requests begin with it: wait for their end, or cancel them.
        """
        return self.begin_unpublish(name, num_cancelled).result()

    def begin_unpublish(self, name: str, num_cancelled: int = 0) -> Future[EraseReceipt]:
        """Remove a public prefix as ``unpublish``, without waiting for tiers."""
        if all(known.name != name for known in self._engine.public_prefixes.listed()):
            raise RequestError(f"name={name!r:.80}: there is no public prefix of that name")
        erasing = self.begin_erase(salt_of_public(name), num_cancelled)
        self._engine.public_prefixes.remove(name)
        return erasing

    def erase(self, cache_salt: str | bytes, num_cancelled: int = 0) -> EraseReceipt:
        """Remove everything of a tenant, and wait until its tiers are overwritten."""
        return self.begin_erase(cache_salt, num_cancelled).result()

    def begin_erase(self, cache_salt: str | bytes, num_cancelled: int = 0) -> Future[EraseReceipt]:
        """Remove every block, token id, digest, event, count, key and value of a tenant.

        Args:
            cache_salt: The tenant's, or that of a public prefix.
            num_cancelled: Requests that were cancelled for it; for the receipt.

        Returns:
            The receipt, once tiers are overwritten too, which takes place in a thread: from now on
            they neither load nor store anything of the tenant.

        Raises:
            CacheInUse: Requests of it are live: wait for their end, or cancel them.

        Effects: everything of it is removed from all tiers. Every slot of the KV stores and of
        states without live content is overwritten with zeros, since evicted and free blocks still
        hold what was computed. The totals still count the tenant's requests, and the settings still
        have its ``tenant_shares``. Cost: every layer's unused slots are read once, and written
        where they are not zero.
        """
        live = self._engine.requests_of(cache_salt)
        if live:
            raise CacheInUse(
                f"{len(live)} requests of the tenant are live: wait until they have ended, or "
                "pass cancel_running=True"
            )
        salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        tiers = self._engine.tiers
        if tiers is not None:
            tiers.loads.end_loads_of(salt)
        self._engine.recorder.tick()
        receipt = self._engine.cache.admin.erase(salt)
        self._engine.grammars.erase(salt.decode(errors="replace"))
        num_texts, num_turns = self._engine.prompts.remove_texts(salt)
        self._engine.audit.erase(salt)
        self._engine.rebase.erase(salt)
        self._engine.waits.erase(salt)
        if self._engine.image_encoder is not None:
            self._engine.image_encoder.remove_outputs(salt)
        self._engine.recorder.on_erased(salt)
        receipt = replace(
            receipt,
            num_requests=num_cancelled,
            num_zeroed_slots=self._zero_unused_slots(),
            num_texts=num_texts,
            num_turns=num_turns,
        )
        if tiers is not None:
            return tiers.begin_erase(salt, receipt)
        erased = Future[EraseReceipt]()
        erased.set_result(receipt)
        return erased

    def update_weights(self, update: WeightUpdate) -> int:
        """Replace the model's weights; as ``LLM.update_weights``.

        Effects: running requests continue with the keys and values that they have, and publish
        nothing more.
        """
        engine = self._engine
        engine.drain_tiers()
        engine.loaded = update.apply(engine.loaded)
        engine.identities.renew(engine.loaded)
        engine.recorder.tick()
        epoch = engine.cache.admin.new_epoch(engine.loaded.fingerprint)
        engine.recorder.on_new_epoch()
        engine.prompts.remove_texts()
        engine.rebase.erase()
        if engine.image_encoder is not None:
            engine.image_encoder.remove_outputs(None)
        return epoch

    def start_recording(self, path: str | Path) -> Path:
        """Record a trace from now on; as ``LLM.start_recording``."""
        engine, recorder = self._engine, self._engine.recorder
        if recorder.path is not None:
            raise ConfigError(
                f"a recording to {str(recorder.path)!r} runs: stop it before you begin another one"
            )
        if engine.plugged.wrap_order is not None:
            raise ConfigError(
                f"a plug-in serves (index={engine.config.index!r}, "
                f"eviction_policy={engine.config.eviction_policy!r}, "
                f"order={engine.config.order!r}), and a trace cannot be replayed under code of "
                "your own: serve without it to record"
            )
        cache = engine.cache
        engine.prices.reset()  # a replay begins unmeasured
        is_cold = not engine.has_work and cache.manager.pool.num_unused == cache.config.num_blocks
        recorder.start(
            Path(path),
            cache.config,
            scheduler=engine.scheduler.config,
            model=self._shape(),
            epoch=cache.manager.epoch,
            is_cold=is_cold,
        )
        return Path(path)

    def start_recording_if_set(self) -> None:
        """Record from the first request on, if ``record_trace`` is set.

        Raises:
            ConfigError: The file cannot be made.
        """
        if self._engine.config.record_trace is not None:
            self.start_recording(self._engine.config.record_trace)

    def stop_recording(self) -> Path | None:
        """End the recording and return its path; None if none runs."""
        return self._engine.recorder.stop()

    def _tokens(self, prompt: Prompt) -> "array[int]":
        """Return a prompt's packed ids, as ``tokenize``."""
        return tokenize(self._engine.prompts.tokenized(prompt), self._engine.loaded)

    def _shape(self) -> dict[str, Any]:
        """Return the sizes of the model, for the header of a trace."""
        loaded, dtype = self._engine.loaded, self._engine.runner.kv_stores[0].dtype
        return {
            "name": Path(loaded.name).name,
            "num_layers": len(loaded.kv_spec.layers),
            "vocab_size": loaded.vocab_size,
            "kv_dtype": str(dtype).removeprefix("torch."),
            "token_bytes": loaded.kv_spec.bytes_per_token(dtype),
        }

    def _zero_unused_slots(self) -> int:
        """Overwrite all slots without live content; returns how many, not counting states."""
        count, runner = 0, self._engine.runner
        live_slots = self._engine.cache.admin.live_slots()
        if self._engine.tiers is not None:
            size = runner.kv_stores[0].block_size
            live_slots[0].update(dict.fromkeys(self._engine.tiers.loads.blocks_in_use, size))
        if runner.states.num_slots:
            runner.states.zero(set(range(runner.states.num_slots)) - live_slots.pop().keys())
        for store, live in zip(runner.kv_stores, live_slots, strict=True):
            offsets = torch.arange(store.block_size)  # (block_size,)
            used = torch.zeros(store.num_blocks, dtype=torch.int64)  # (num_blocks,)
            for block, num_tokens in live.items():
                used[block] = num_tokens
            unused = (offsets >= used[:, None]).flatten().nonzero().flatten()  # (num_unused,)
            store.zero(unused.to(store.device))
            count += len(unused)
        return count


class AsyncAdminApi:
    """The calls of ``AdminApi`` that wait for steps of an engine in a thread."""

    def __init__(
        self, admin: AdminApi, thread: EngineThread, tokenizing: TokenizerExecutor
    ) -> None:
        self._admin, self._thread, self._tokenizing = admin, thread, tokenizing

    async def erase(self, cache_salt: str, cancel_running: bool) -> EraseReceipt:
        """Remove everything of a tenant, once its requests have ended."""
        check_salt(cache_salt)
        async with self._blocked(cache_salt, cancel_running) as cancelled:
            erasing = await self._thread.call(
                lambda: self._admin.begin_erase(cache_salt, cancelled)
            )
        return await asyncio.shield(asyncio.wrap_future(erasing))

    async def publish(self, name: str, prompt: Prompt) -> LeaseReceipt:
        """Compute a prefix once for several tenants, and hold it."""
        prepared = await self._tokenizing.run(lambda: self._admin.publishable(name, prompt))
        params = SamplingParams(max_tokens=1, detokenize=False)
        request = self._tokenizing.request
        async for _ in self._thread.stream(lambda: request(prepared, params, None, 0)):
            pass  # if it fails, the receipt says that it is not cached
        return await self._thread.call(lambda: self._admin.publish(prepared))

    async def unpublish(self, name: str, cancel_running: bool) -> EraseReceipt:
        """Remove a public prefix, once the requests that begin with it have ended."""
        async with self._blocked(salt_of_public(name), cancel_running) as cancelled:
            erasing = await self._thread.call(lambda: self._admin.begin_unpublish(name, cancelled))
        return await asyncio.shield(asyncio.wrap_future(erasing))

    @asynccontextmanager
    async def _blocked(self, salt: str | bytes, cancel_running: bool) -> AsyncIterator[int]:
        """Refuse a tenant's new requests, and wait for its others; yields how many it cancelled."""
        thread, engine = self._thread, self._thread.engine
        # Not awaited: a caller that is cancelled in between must not leave the tenant blocked.
        thread.commands.put(lambda: engine.block_tenant(salt))
        try:
            cancelled = 0
            if cancel_running:
                cancelled = await thread.call(lambda: thread.cancel_all(salt))
            while await thread.call(lambda: engine.requests_of(salt)):
                await asyncio.sleep(0)  # answered between steps: one question per step
            while await thread.call(lambda: engine.is_loading(salt)):
                await asyncio.sleep(WAIT_S)
            yield cancelled
        finally:
            thread.run_later(lambda: engine.unblock_tenant(salt))
