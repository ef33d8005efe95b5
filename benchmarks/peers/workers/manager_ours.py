"""Ostinato's cache manager, called as its scheduler calls it."""

from array import array
from typing import Any

from benchmarks.peers.protocol import answer_questions
from benchmarks.peers.workers.manager_scenes import BLOCK_SIZE, ManagerWorker


class OurManager(ManagerWorker):
    """The radix index, in blocks of 16; a prompt is found token by token.

    The policy is the engine's default unless a variant names another one.
    """

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load the torch-free rooms alone."""
        import ostinato
        from ostinato.core import identity
        from ostinato.lab.replay.serial_replay import USUAL_POLICY

        self.identity = identity
        self.policy = settings.get("policy", USUAL_POLICY)
        taken = {"block_size": BLOCK_SIZE, "policy": self.policy}
        return {"version": ostinato.__version__, "settings": taken}

    def make(self, num_tokens: int) -> None:
        """Begin with an empty cache."""
        from ostinato.assembly import build_cache
        from ostinato.settings import PrefixCacheConfig

        config = PrefixCacheConfig(
            num_tokens // BLOCK_SIZE, BLOCK_SIZE, eviction_policy=self.policy
        )
        self.cache = build_cache(config).manager

    def take(self, tokens: Any) -> int:
        """Key, look-up, admission, publication, commit and release."""
        key = self.identity.PrefixKey(self.identity.Identity(), tokens)
        admitted = self.cache.admit(key, self.cache.match(key))
        assert admitted is not None, "the scenes leave room for all"
        table, _ = admitted
        self.cache.publish(table, len(key))
        self.cache.commit()
        self.cache.release(table, len(key))
        return int(table.num_cached_tokens)

    def pack(self, tokens: list[int]) -> "array[int]":
        """Return an array of 32-bit numbers."""
        return array("I", tokens)


if __name__ == "__main__":
    answer_questions(OurManager())
