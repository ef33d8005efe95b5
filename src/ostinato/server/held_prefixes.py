"""Leases of prefixes that clients asked to keep.

Anthropic's clients send the same ``cache_control`` with every request of a conversation. The first
one takes a lease; a later one that hits all of it has thereby refreshed that lease and takes none
of its own. Otherwise a busy prompt would be leased thousands of times.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from ostinato.core.identity import is_salt_of
from ostinato.core.tokens import pack_tokens
from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.server.call import Covered
from ostinato.tenants.terms import LeaseReceipt, LeaseTerms

MAX_HELD = 4096
"""Most leases that are remembered; a forgotten one still expires by itself."""

_Key = tuple[str, LeaseTerms, bytes]


class HeldPrefixes:
    """Takes one lease per prefix."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Start without leases."""
        self._llm = llm
        self._holding = asyncio.Lock()  # two requests with one prefix take one lease
        self._held: OrderedDict[_Key, LeaseReceipt] = OrderedDict()

    def __len__(self) -> int:
        """Number of leases that are remembered; some may have expired."""
        return len(self._held)

    async def hold(
        self, prompt_context: Prompt, tokens: Sequence[int], terms: LeaseTerms, num_cached: int
    ) -> LeaseReceipt:
        """Lease a prefix that a request has just computed or hit.

        Args:
            prompt_context: Salt, public prefixes, adapter and images of the request.
            tokens: Token ids of the prefix.
            terms: For how long.
            num_cached: Prompt tokens that hit, which refreshed their lease.

        Returns:
            How much of it is leased, by a new lease or an earlier one.
        """
        content = hashlib.sha256(pack_tokens(tokens).tobytes())
        content.update(prompt_context.adapter.encode())
        for picture in prompt_context.images:
            content.update(picture.digest)
        key = prompt_context.cache_salt, terms, content.digest()
        async with self._holding:
            prompt = Prompt(
                token_ids=tokens,
                cache_salt=prompt_context.cache_salt,
                public_prefixes=prompt_context.public_prefixes,
                adapter=prompt_context.adapter,
                images=prompt_context.images,
            )
            return await self._hold(key, prompt, num_cached)

    async def _hold(self, key: _Key, prompt: Prompt, num_cached: int) -> LeaseReceipt:
        before = self._held.get(key)
        if before is not None and before.lease_id is not None:
            if num_cached >= before.num_tokens and await self._llm.has_lease(before.lease_id):
                self._held.move_to_end(key)
                return before
            await self._llm.end_lease(before.lease_id)
        receipt = await self._llm.lease(prompt, key[1])
        self._held.pop(key, None)
        if receipt.lease_id is not None:
            self._held[key] = receipt
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)
        return receipt

    def erase(self, salt: str) -> int:
        """Remove the leases of an erased salt; return their number."""
        keys = [key for key in self._held if is_salt_of(key[0], salt)]
        for key in keys:
            del self._held[key]
        return len(keys)


async def hold_all(
    held: HeldPrefixes, prompt_context: Prompt, places: Sequence[Covered], output: RequestOutput
) -> list[tuple[Covered, int]]:
    """Lease the beginnings of a prompt that was just computed; return how much of each is."""
    tokens, num_cached = output.prompt_token_ids, output.num_cached_tokens
    leased = list[tuple[Covered, int]]()
    for place in places:
        if not place.num_tokens:
            continue
        beginning = replace(prompt_context, images=prompt_context.images[: place.num_images])
        receipt = await held.hold(beginning, tokens[: place.num_tokens], place.terms, num_cached)
        leased.append((place, receipt.num_tokens))
    return leased
