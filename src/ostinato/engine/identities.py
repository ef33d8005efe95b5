"""The identity of a prompt now: weights, KV format, tenant, adapter and public prefix."""

from array import array
from dataclasses import replace

import torch

from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity
from ostinato.engine.adapters import Adapters
from ostinato.engine.prompts import Prompt
from ostinato.engine.public_prefixes import PublicPrefixes, salt_of_public
from ostinato.runner.model_loader import LoadedModel


class Identities:
    """Makes the identities of one engine's requests."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_dtype: torch.dtype,
        cache: CacheManager,
        adapters: Adapters,
        public_prefixes: PublicPrefixes,
    ) -> None:
        """Begin with the weights of a model; the epoch is the cache's."""
        self._weights = loaded.fingerprint
        self._kv_dtype = str(kv_dtype)
        self._cache = cache
        self._adapters = adapters
        self._public_prefixes = public_prefixes

    def renew(self, loaded: LoadedModel) -> None:
        """Use the fingerprint of new weights from now on."""
        self._weights = loaded.fingerprint

    def of_tenant(self, cache_salt: str) -> Identity:
        """Return the identity of a tenant's requests, without adapter and public prefix."""
        return Identity(
            weights=self._weights,
            epoch=self._cache.epoch,
            kv_dtype=self._kv_dtype,
            tenant=cache_salt.encode(),
        )

    def of_prompt(self, prompt: Prompt, tokens: "array[int]", reads: bool = True) -> Identity:
        """Return the identity of a prompt; unless it reads, it uses no public prefix."""
        own = self.of_tenant(prompt.cache_salt)
        if prompt.publishes is not None:
            return replace(own, tenant=salt_of_public(prompt.publishes))
        if prompt.adapter:
            own = self._adapters.identity_of(own, prompt.adapter, tokens)
        prefixes = prompt.public_prefixes if reads else ()
        public = self._public_prefixes.longest_of(tokens, prefixes)
        if public is not None and 0 < own.adapter_start < public.num_tokens:
            public = None  # the adapter computes the end of it
        return replace(own, public_prefix=public)
