"""What may an operator ask of an engine?

* lease: keep a prefix, pinned or for a time, as hosted APIs sell it;
* publish: let several tenants share a prefix, and compute only what follows it;
* erase: leave nothing of a tenant, down to the keys and values;
* new weights: see ``weights``;
* recordings: see ``recorder``.

All of it happens between steps; the faces see to that, each in its way.
"""

from array import array
from pathlib import Path
from typing import Any

import torch

from ostinato.core.errors import CacheInUse, ConfigError, EmptyPrompt, RequestError
from ostinato.core.identity import PrefixKey
from ostinato.engine.engine import Engine
from ostinato.engine.prompts import Prompt
from ostinato.engine.public_prefixes import salt_of_public
from ostinato.engine.recorder import Settings
from ostinato.engine.request_validation import tokenize
from ostinato.engine.weights import WeightUpdate
from ostinato.tenants.terms import EraseReceipt, LeaseId, LeaseReceipt, LeaseStatus, LeaseTerms


class AdminApi:
    """The operator's side of one engine."""

    def __init__(self, engine: Engine) -> None:
        """Serve an engine."""
        self._engine = engine

    def lease(self, prompt: Prompt, terms: LeaseTerms) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted.

        Args:
            prompt: The prefix; its salt says whose it is.
            terms: For how long.

        Returns:
            What is held, and why not all of it.

        Raises:
            RequestError: It is no prompt of this model.
        """
        tokens = self._tokens(prompt)
        if not tokens:
            raise EmptyPrompt("a lease needs at least one token: the prompt is empty")
        identity = self._engine.identity_of(prompt, tokens)
        key, recorder = PrefixKey(identity, tokens), self._engine.recorder
        recorder.tick()
        receipt = self._engine.cache.admin.lease(key, terms)
        recorder.on_leased(key, terms, receipt.lease_id)
        return receipt

    def end_lease(self, lease_id: LeaseId) -> bool:
        """Let go of a lease; returns False if there is none of that number."""
        self._engine.recorder.tick()
        ended = self._engine.cache.admin.end_lease(lease_id)
        self._engine.recorder.on_lease_ended(lease_id)
        return ended

    def publishable(self, name: str, prompt: Prompt) -> Prompt:
        """Return the prompt that computes what is to be published: whole blocks of another.

        Raises:
            RequestError: It is no prompt of this model, fills no block, or the name is taken.
        """
        prompt = self._engine.tokenized(prompt)
        tokens = self._tokens(prompt)
        whole = self._engine.public_prefixes.whole_blocks(name, tokens)
        known, num_left = prompt.known, len(tokens) - len(whole)
        head = None if known is None else known.head(len(known) - num_left)
        return Prompt(token_ids=whole, publishes=name, known=head)

    def publish(self, prompt: Prompt) -> LeaseReceipt:
        """Hold a prefix for all tenants that may read it.

        Args:
            prompt: As ``publishable`` made it; computed by a request since.

        Returns:
            Accepted or rejected, and why.

        Raises:
            RequestError: Somebody published another under that name meanwhile.
        """
        name, engine = prompt.publishes, self._engine
        assert name is not None, "a prompt to be published says under which name"
        tokens = engine.public_prefixes.whole_blocks(name, self._tokens(prompt))
        key = PrefixKey(engine.identity_of(prompt, tokens), tokens)
        engine.recorder.tick()
        receipt = engine.cache.admin.publish(key)
        engine.recorder.on_published(key)
        if receipt.status is LeaseStatus.ACCEPTED:
            engine.public_prefixes.add(name, tokens)
            if prompt.known is not None and engine.texts is not None:
                engine.texts.known.note(salt_of_public(name), prompt.known)
        return receipt

    def unpublish(self, name: str, num_cancelled: int = 0) -> EraseReceipt:
        """Forget a public prefix, and what all tenants computed behind it; as ``erase``.

        Raises:
            RequestError: There is none of that name.
            CacheInUse: Requests begin with it: let them end, or cancel them.
        """
        if all(known.name != name for known in self._engine.public_prefixes.listed()):
            raise RequestError(f"name={name!r:.80}: there is no public prefix of that name")
        receipt = self.erase(salt_of_public(name), num_cancelled)
        self._engine.public_prefixes.remove(name)
        return receipt

    def erase(self, cache_salt: str | bytes, num_cancelled: int = 0) -> EraseReceipt:
        """Leave nothing of a tenant: no block, token id, digest, event, count, key or value.

        Args:
            cache_salt: The tenant's, or bytes that stand for a public prefix.
            num_cancelled: Its requests that were cancelled for it; for the receipt.

        Raises:
            CacheInUse: Requests of it are live: let them end, or cancel them.

        Effects: every slot of the KV stores without live content is overwritten with zeros,
        since blocks that were evicted or given back still hold what was computed. The numbers
        of the tenant's requests stay in the totals; salts of ``allotments`` stay in the
        settings. Cost: every layer's unused slots are read once, and written where need be.
        """
        live = self._engine.requests_of(cache_salt)
        if live:
            raise CacheInUse(
                f"{len(live)} requests of the tenant are live: wait until they have ended, or "
                "pass cancel_running=True"
            )
        salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        self._engine.recorder.tick()
        receipt = self._engine.cache.admin.erase(salt)
        self._engine.forget_grammars(salt)
        num_texts = self._engine.forget_texts(salt)
        self._engine.recorder.on_erased(salt)
        return EraseReceipt(
            num_cancelled,
            receipt.num_blocks,
            receipt.num_leases,
            receipt.num_events,
            self._zero_unused_slots(),
            num_texts,
        )

    def update_weights(self, update: WeightUpdate) -> int:
        """Put new weights in the place of the old ones.

        Returns:
            The new epoch.

        Effects: running requests go on over the keys and values that they have, and publish
        nothing more; nothing that was computed before can hit. Leases end.
        """
        return self._engine.apply_weights(update)

    def start_recording(self, path: str | Path) -> Path:
        """Record what happens from now on, without any content.

        Args:
            path: A file that does not exist; ``ostinato simulate`` reads it.

        Raises:
            ConfigError: A recording runs already, or the file cannot be made.
        """
        engine, recorder = self._engine, self._engine.recorder
        if recorder.path is not None:
            raise ConfigError(
                f"a recording to {str(recorder.path)!r} runs: stop it before you begin another one"
            )
        cache = engine.cache
        is_cold = not engine.has_work and cache.manager.pool.num_scratch == cache.config.num_blocks
        shape, epoch = self._shape(), cache.manager.epoch
        settings = Settings(cache.config, engine.scheduler.config, shape, epoch, is_cold)
        recorder.start(Path(path), settings)
        return Path(path)

    def start_recording_if_set(self) -> None:
        """Record from the first request on, if ``record_trace`` says where.

        Raises:
            ConfigError: The file cannot be made.
        """
        if self._engine.config.record_trace is not None:
            self.start_recording(self._engine.config.record_trace)

    def stop_recording(self) -> Path | None:
        """End the recording and return where it is; None if none runs."""
        return self._engine.recorder.stop()

    def _tokens(self, prompt: Prompt) -> "array[int]":
        """Return a prompt's packed ids.

        Raises:
            RequestError: It is no prompt of this model.
        """
        return tokenize(self._engine.tokenized(prompt), self._engine.loaded)

    def _shape(self) -> dict[str, Any]:
        """Say what the model's tokens weigh, for the header of a trace."""
        loaded, dtype = self._engine.loaded, self._engine.kv_dtype()
        return {
            "name": Path(loaded.name).name,
            "num_layers": len(loaded.kv_spec.layers),
            "vocab_size": loaded.vocab_size,
            "kv_dtype": str(dtype).removeprefix("torch."),
            "token_bytes": loaded.kv_spec.bytes_per_token(dtype),
        }

    def _zero_unused_slots(self) -> int:
        """Overwrite all slots without live content; returns how many."""
        count = 0
        live_slots = self._engine.cache.admin.live_slots()
        for store, live in zip(self._engine.runner.kv_stores, live_slots, strict=True):
            offsets = torch.arange(store.block_size)  # (block_size,)
            used = torch.zeros(store.num_blocks, dtype=torch.int64)  # (num_blocks,)
            for block, num_tokens in live.items():
                used[block] = num_tokens
            unused = (offsets >= used[:, None]).flatten().nonzero().flatten()  # (num_unused,)
            store.zero(unused.to(store.device))
            count += len(unused)
        return count
