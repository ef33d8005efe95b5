"""Cost of remembering requests, and of an explanation. No model: the cache alone.

::

    python -m benchmarks.explain            # microseconds per request, off and on
    python -m benchmarks.explain --json

Each request brings 2,048 tokens, most of them shared, and 32 tokens of answer; the pool holds
either a tenth of what comes, so that every request evicts, or all of it. Rounds with and without
a memory take turns, and the quickest of each counts, in processor time.
"""

import json
import random
import time
from array import array

from benchmarks.command_line import parser_of
from ostinato.assembly import PrefixCache, build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.observe.explain import explain
from ostinato.settings import PrefixCacheConfig

REQUESTS, PROMPT, OWN, ANSWER, ROUNDS = 300, 2048, 64, 32, 15
POOLS = {"evicting": 200, "roomy": 8192}


def make_prompts(seed: int = 0) -> list["array[int]"]:
    """Return prompts that part from a common text at a random place, shape (<= PROMPT,) each."""
    dice = random.Random(seed)
    head = array("I", dice.choices(range(50_000), k=PROMPT - OWN))
    return [
        head[: dice.randrange(PROMPT - OWN)] + array("I", dice.choices(range(50_000), k=OWN))
        for _ in range(REQUESTS)
    ]


def serve(cache: PrefixCache, tokens: "array[int]", name: str) -> None:
    """Serve one request, a step per token of its answer."""
    key = PrefixKey(Identity(), tokens)
    manager = cache.manager
    admitted = manager.admit(key, manager.match(key), context=RequestContext(name))
    assert admitted is not None
    table, _ = admitted
    for position in range(ANSWER):
        manager.grow(table, len(key))
        manager.publish(table, len(key))
        manager.commit()
        key.append(position)
    manager.release(table, len(key) - 1)


def measure(num_blocks: int) -> dict[str, float]:
    """Return microseconds per request without and with a memory, and per explanation."""
    best = {"off_us": float("inf"), "on_us": float("inf"), "explain_us": float("inf")}
    prompts = make_prompts()
    for _ in range(ROUNDS):
        for column, keep in (("off_us", 0), ("on_us", 1000)):
            cache = build_cache(PrefixCacheConfig(num_blocks, keep_explanations=keep))
            start = time.process_time()
            for number, tokens in enumerate(prompts):
                serve(cache, tokens, str(number))
            spent = (time.process_time() - start) / len(prompts)
            best[column] = min(best[column], spent * 1e6)
        start = time.process_time()
        for number in range(len(prompts) - 20, len(prompts)):
            explain(cache.history, str(number))
        best["explain_us"] = min(best["explain_us"], (time.process_time() - start) / 20 * 1e6)
    return best


def main() -> None:
    """Print a line per pool."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", action="store_true")
    wants_json = parser.parse_args().json
    figures = {name: measure(num_blocks) for name, num_blocks in POOLS.items()}
    if wants_json:
        print(json.dumps(figures))
        return
    for name, best in figures.items():
        print(
            f"{name:9} {best['off_us']:7.1f} us per request without, {best['on_us']:7.1f} with; "
            f"{best['explain_us']:7.1f} us per explanation"
        )


if __name__ == "__main__":
    main()
