"""How far along is a batch, and how much of it was cached?

One line in the manner of nano-vllm, with the share of cached tokens::

    Generating: 25%|██▌    | 250/1000 [prefill 9103 tok/s, decode 318 tok/s, cached 96.8%]
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from ostinato.observe.counters import CacheStats
from ostinato.sched.stats import SchedulerStats

ShowProgress = bool | Callable[..., Any]
"""Whether to show progress, or what makes the bar, such as ``partial(tqdm, leave=False)``."""


class GenerationProgress:
    """A progress bar over requests; a context manager."""

    def __init__(
        self, num_requests: int, cache: CacheStats, scheduler: SchedulerStats, shown: ShowProgress
    ) -> None:
        """Start to count from what the engine has done so far.

        Args:
            num_requests: Requests of the batch.
            cache: Counters of the cache; read, never changed.
            scheduler: Counters of the scheduler; read, never changed.
            shown: False shows nothing; a callable makes the bar in place of ``tqdm``.
        """
        self._cache, self._scheduler = cache, scheduler
        make = shown if callable(shown) else tqdm
        self._bar = make(total=num_requests, desc="Generating", unit="req", disable=not shown)
        self._start_s = time.monotonic()
        self._before = self._counts()

    def __enter__(self) -> "GenerationProgress":
        """Show the bar."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def update(self, num_finished: int) -> None:
        """Note that a step ran in which so many requests ended."""
        if self._bar.disable:
            return
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        prompt, output, query, hit = (
            now - before for now, before in zip(self._counts(), self._before, strict=True)
        )
        cached = hit / query if query else 0.0
        self._bar.set_postfix_str(
            f"prefill {prompt / elapsed_s:.0f} tok/s, decode {output / elapsed_s:.0f} tok/s, "
            f"cached {cached:.1%}",
            refresh=False,
        )
        self._bar.update(num_finished)

    def _counts(self) -> tuple[int, int, int, int]:
        first = self._cache.first
        return (
            self._scheduler.computed_prompt_tokens,
            self._scheduler.computed_output_tokens,
            first.query_tokens,
            first.hit_tokens,
        )
