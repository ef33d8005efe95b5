"""The blocks that fit a given memory, per group of layers.

Memory is divided as in the engine (``hybrid.pool_sizes``): full attention keeps the KV of every
cached token, layers with a window have a smaller pool of their own. Gemma 3 27B writes 507,904
bytes per token; of a long cached prefix 81,920 per token stay, and the ends in its windows.
"""

from dataclasses import dataclass, replace

from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.hybrid.pool_sizes import TOKENS_PER_CHECKPOINT, split_pools, split_states
from ostinato.lab.replay.serial_replay import Pools
from ostinato.lab.size.kv_bytes import KVBytes
from ostinato.settings import StateConfig, WindowConfig, window_blocks

_ENGINE_BLOCK = 16
"""Tokens per block of the engine, whatever the trace has."""

_STEP_TOKENS = 2048
"""Most tokens of one step; the engine's own default."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """KV of one token, by group of layers.

    Attributes:
        full_bytes: In layers that keep every token; 0 if all have windows.
        windows: Tokens that a window sees and bytes of one token in its layers, by size.
        num_running: Sequences that run at once, whose windows must fit.
        state_bytes: What layers that keep a state have of one sequence, or of one checkpoint.
    """

    full_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    num_running: int = 1
    state_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse a model without KV.

        Raises:
            ConfigError: It has only states.
        """
        if self.token_bytes < 1:
            raise ConfigError("this model has no KV per token, so its prefixes cannot be cached")

    @property
    def token_bytes(self) -> int:
        """Of a token inside every window."""
        return self.full_bytes + sum(each for _, each in self.windows)

    @property
    def _scheduling(self) -> SchedulerConfig:
        tokens = max(_STEP_TOKENS, self.num_running)
        return SchedulerConfig(max_num_seqs=self.num_running, max_num_batched_tokens=tokens)

    def blocks(self, memory_bytes: int, block_tokens: int) -> tuple[int, tuple[WindowConfig, ...]]:
        """Divide memory as the engine does.

        Returns:
            Blocks of the trace for full attention, and for each window.
        """
        size = min(_ENGINE_BLOCK, block_tokens)
        full, windows = split_pools(
            memory_bytes // (self.token_bytes * size),
            [size * each for each in (self.full_bytes, *(each for _, each in self.windows))],
            [window for window, _ in self.windows],
            size,
            self._scheduling,
        )
        pairs = zip(self.windows, windows, strict=True)
        return full * size // block_tokens, tuple(
            _window(window, num * size // block_tokens, block_tokens) for (window, _), num in pairs
        )

    def pools(self, memory_bytes: int, block_tokens: int) -> Pools:
        """Return the cache of a serial replay, whose blocks count as one token each.

        Raises:
            ConfigError: Not one block fits.
        """
        states = None
        if self.state_bytes:
            slots = self.checkpoints(memory_bytes, block_tokens)
            memory_bytes -= (2 * self.num_running + slots) * self.state_bytes
            states = StateConfig(2 + slots, 1)  # a serial replay runs one sequence
        full, windows = self.blocks(memory_bytes, block_tokens)
        if not full:
            raise ConfigError(
                f"{memory_bytes:,} bytes of memory hold no block of {block_tokens} tokens of "
                f"{self.token_bytes:,} bytes: give more"
            )
        in_blocks = (replace(w, window=window_blocks(w.window, block_tokens)) for w in windows)
        return Pools(full, tuple(in_blocks), states)

    def checkpoints(self, memory_bytes: int, block_tokens: int) -> int:
        """Return how many states are kept for prefixes, besides those of running sequences."""
        _, slots = split_states(
            memory_bytes,
            self.token_bytes * block_tokens,
            self.state_bytes,
            block_tokens,
            self._scheduling,
        )
        return max(0, slots - 2 * self.num_running)

    def with_states(self, memory_bytes: int) -> int:
        """Return the memory that leaves ``memory_bytes`` for blocks beside states."""
        per_checkpoint = self.token_bytes * TOKENS_PER_CHECKPOINT
        states = memory_bytes * self.state_bytes // per_checkpoint
        return memory_bytes + states + 2 * self.num_running * self.state_bytes

    def memory_for(self, num_blocks: int, block_tokens: int) -> int:
        """Return the least memory with ``num_blocks`` blocks of full attention, without states."""
        low, high = 0, num_blocks * block_tokens * self.token_bytes
        if not self.windows:
            return high
        while high - low > max(1, high // 10_000):
            middle = (low + high) // 2
            if self.blocks(middle, block_tokens)[0] >= num_blocks:
                high = middle
            else:
                low = middle
        return high


def kv_groups(kv: KVBytes, num_running: int = 1, copies: int = 1) -> KVGroups:
    """Return a model's groups as the engine makes them: one per window size.

    Args:
        kv: What its layers keep.
        num_running: Sequences that run at once.
        copies: Copies of a token's KV on the GPUs of a replica.
    """
    full, by_window = 0, dict[int, int]()
    for group in kv.groups:
        window = group.layer.window_tokens
        if window is None:
            full += group.token_bytes * copies
        elif group.token_bytes:
            by_window[window] = by_window.get(window, 0) + group.token_bytes * copies
    states = kv.state_bytes * copies
    return KVGroups(full, tuple(sorted(by_window.items())), num_running, states)


def _window(window: int, num_blocks: int, block_tokens: int) -> WindowConfig:
    """Return a window's blocks, at least those of one sequence and its next step."""
    step = -(-_STEP_TOKENS // block_tokens)
    return WindowConfig(window, max(num_blocks, window_blocks(window, block_tokens) + step))
