"""A scheduler whose steps take what a price list says, in simulated time.

::

    timed = TimedScheduler()
    timed.add("stream", 1, max_tokens=100)
    timed.add("long", 4_000)
    timed.step()     # {"stream": 1, "long": 55}
    timed.took_s     # 0.25
"""

from typing import Any

from ostinato.assembly import PrefixCache, build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.scheduling.learned_prices import LearnedPrices, StepTimer
from ostinato.scheduling.step_prices import StepPrices, plan_work
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.tiny_scheduler import make_request

PRICES = StepPrices(0.040, 0.004, 1e-7, free_tokens=4)
"""A step of 4 tokens takes 40 ms, and each further token 4 ms."""


class TimedScheduler:
    """A scheduler, its clock, and how long its last step took.

    Attributes:
        scheduler: The real one.
        prices: What it knows of prices.
        plan: Its last plan.
        took_s: What the last step took.
        limit_s: What it might take by the limits of the settings, if all prices were known.
        now_s: The clock.
    """

    def __init__(
        self,
        knows_prices: bool = True,
        true_prices: StepPrices = PRICES,
        cache: PrefixCache | None = None,
        **config: Any,
    ) -> None:
        """Begin with an empty cache, or with that of another scheduler."""
        self.now_s, self.took_s, self.limit_s, self.plan = 0.0, 0.0, 0.0, StepPlan(())
        self.cache = cache or build_cache(PrefixCacheConfig(8_000, 4), lambda: self.now_s)
        chosen: dict[str, Any] = {"max_step_ms": 250, "order": "shortest_first"} | config
        self.prices = LearnedPrices(true_prices if knows_prices else None)
        settings = SchedulerConfig(**chosen)
        self.scheduler = build_scheduler(
            settings, self.cache, lambda: self.now_s, prices=self.prices
        )
        self._true_prices, self._num_added = true_prices, 0
        all_tokens = settings.max_num_batched_tokens
        known = LearnedPrices(true_prices)
        self._oracle = StepTimer(settings.max_step_ms or 10**6, all_tokens, known)

    def add(self, name: str, num_tokens: int, max_tokens: int = 1, first: str = "") -> None:
        """Add a prompt whose tokens no other one has, behind those that it shares."""
        self._num_added += 1
        prompt = first + chr(1_000 + self._num_added) * num_tokens
        self.scheduler.add(make_request(name, prompt, max_tokens=max_tokens), (0,))

    def step(self, slowdown: float = 1.0) -> dict[str, int]:
        """Run a step; return how many tokens of each request it computed."""
        live = [s for family in self.scheduler.requests.live.values() for s in family]
        names = {s.sequence_id: str(s.request.request_id) for s in live}
        prompts = {s.sequence_id for s in live if s.num_uncomputed > 1}
        self.plan = self.scheduler.plan()
        self._note_limit(prompts, len(live) == 1)
        self.took_s = self._true_prices.seconds(plan_work(self.plan)) * slowdown
        self.now_s += self.took_s
        results = (
            SequenceResult((SampledToken(7),)) if s.sample else SequenceResult()
            for s in self.plan.sequences
        )
        computed = {names[s.sequence_id]: len(s.tokens) for s in self.plan.sequences}
        self.scheduler.commit(StepResult(tuple(results)))
        return computed

    def serve(self, name: str, num_tokens: int, first: str = "") -> None:
        """Serve a request that is alone."""
        self.add(name, num_tokens, first=first)
        while name in map(str, self.scheduler.requests.live):
            self.step()

    def _note_limit(self, prompts: set[Any], is_alone: bool) -> None:
        decoding = [s.end for s in self.plan.sequences if s.sequence_id not in prompts]
        starts = [s.start for s in self.plan.sequences if s.sequence_id in prompts]
        self._oracle.begin(decoding, starts, is_alone)
        self.limit_s = self._oracle.limit_s
