"""Erasures of tiers, in a thread of their own: no step waits for a medium.

From its beginning to its end, nothing of the tenant is loaded from a tier, stored to one or
announced, so that it is unreachable at once and its receipt covers all that was stored.
"""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace

from ostinato.core.identity import Identity
from ostinato.engine.tiers.threads import TierThreads
from ostinato.tenants.terms import EraseReceipt
from ostinato.tiers.port import KVTier


class TierErasures:
    """Erasures that run; called by the engine's thread."""

    def __init__(self, tier: KVTier) -> None:
        self._tier, self._thread = tier, TierThreads("ostinato-tier-erase")
        self._running: list[tuple[bytes, Future[EraseReceipt]]] = []

    def begin(
        self, salt: bytes, receipt: EraseReceipt, wipe: Callable[[], None]
    ) -> Future[EraseReceipt]:
        """Erase a tenant from every tier; returns the receipt with those of the tiers.

        Args:
            salt: The tenant's.
            receipt: What was erased elsewhere.
            wipe: Called before, in the thread: waits for stores, and overwrites buffers.
        """

        def erase() -> EraseReceipt:
            wipe()
            return replace(receipt, tiers=tuple(self._tier.erase(salt)))

        future = self._thread.submit(erase)
        self._running.append((salt, future))
        return future

    def covers(self, identity: Identity) -> bool:
        """Whether what belongs to an identity is being erased."""
        return any(identity.belongs_to(salt) for salt, _ in self._running)

    def settle(self) -> None:
        """Let the tenants of ended erasures use the tiers again."""
        self._running = [one for one in self._running if not one[1].done()]

    def wait(self, seconds: float) -> None:
        """Wait until all have ended."""
        wait_for_futures([future for _, future in self._running], seconds)

    def close(self, seconds: float) -> int:
        """Wait for erasures and end the thread; returns how many are not complete."""
        self.wait(seconds)
        self.settle()
        self._thread.close(0)
        return len(self._running)
