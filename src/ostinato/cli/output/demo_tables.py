"""Tables of the demo's results."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from ostinato.cli.demonstration.demo_examples import EXAMPLES, Outcome
from ostinato.cli.demonstration.demo_waves import Calls, CallTime, Wave
from ostinato.cli.output.tables import attributes, matrix
from ostinato.lab.simulate.savings import Reuse, Workload, by_token
from ostinato.lab.size.quantities import count, write_seconds

_COUNTS = ("prompt_tokens", "computed_tokens", "seconds")


@dataclass(frozen=True, slots=True)
class Figures:
    """The demo's measurements of many calls.

    Attributes:
        block_size: Tokens per block.
        calls: The calls.
        no_cache: The calls without a cache; possibly only some of them.
        cold: The calls on an empty cache.
        warm: The same calls again.
        cold_call: A single call on an empty cache.
        warm_call: A single call with another ending after it.
    """

    block_size: int
    calls: Calls
    no_cache: Wave
    cold: Wave
    warm: Wave
    cold_call: CallTime
    warm_call: CallTime

    @property
    def no_cache_seconds(self) -> float:
        """Seconds of all calls without a cache, extrapolated by tokens if time ran out."""
        wave = self.no_cache
        return wave.seconds * wave.prompt_tokens / wave.computed_tokens

    @property
    def workload(self) -> Workload:
        """The calls as a workload."""
        system, suffix = self.calls.system_tokens, self.calls.suffix_tokens
        return Workload(system, suffix, self.cold.num_calls, self.block_size)

    @property
    def num_compared(self) -> int:
        """Calls that were answered without a cache and with one."""
        return len(self.no_cache.answers.keys() & self.cold.answers.keys())

    @property
    def num_equal(self) -> int:
        """Those of them with equal answers in all three waves."""
        cold, warm = self.cold.answers, self.warm.answers
        return sum(
            answer == cold[call] == warm[call] for call, answer in self.no_cache.answers.items()
        )


def calls_table(figures: Figures) -> Table:
    """Return a table of the three waves."""
    headings = (count(figures.cold.num_calls, "call"), "no cache", "cold cache", "same again")
    with_cache = (figures.cold, figures.warm)
    total, slow = figures.no_cache.prompt_tokens, figures.no_cache_seconds
    saved = [total - wave.computed_tokens for wave in with_cache]
    shares = (f"{tokens / total:.1%}" for tokens in saved)
    scaled = "" if figures.no_cache.complete else "about "
    rows: list[list[object]] = [
        ["prompt tokens", total, total, total],
        ["through the model", total, *(wave.computed_tokens for wave in with_cache)],
        ["saved", None, *(Text(f"{tokens:,}", style="green") for tokens in saved)],
        ["share saved", None, *(Text(text, style="green") for text in shares)],
        ["time", scaled + write_seconds(slow), *(write_seconds(w.seconds) for w in with_cache)],
        ["faster", None, *(_times(slow, wave.seconds) for wave in with_cache)],
    ]
    return _table(headings, rows)


def first_token_table(figures: Figures) -> Table:
    """Return a table of a cold and a warm call."""
    cold, warm = figures.cold_call, figures.warm_call
    sooner = _times(cold.seconds, warm.seconds)
    rows = (
        ("cold: nothing is cached", cold.computed_tokens, write_seconds(cold.seconds), None),
        ("warm: another ending", warm.computed_tokens, write_seconds(warm.seconds), sooner),
    )
    return _table(("A single call", "computed", "first token", "sooner"), rows)


def notes(figures: Figures) -> Iterator[str]:
    """Return notes on the results."""
    wave = figures.no_cache
    question = figures.calls.prompts[0].rpartition("\n\n")[2]
    yield f"One of the calls: {question!r} is continued by {figures.cold.answers[0]!r}."
    if not wave.complete:
        yield (
            f"Without a cache we gave up after {write_seconds(wave.seconds)} and "
            f"{wave.computed_tokens:,} tokens; its time is scaled to all {wave.prompt_tokens:,}."
        )
    expected, computed = by_token(figures.workload), figures.cold.computed_tokens
    formula = f"{figures.calls.system_tokens} + {len(figures.calls.prompts):,} x "
    yield (
        f"By arithmetic a cold cache computes {formula}{figures.calls.suffix_tokens} = "
        f"{expected.computed_tokens:,} tokens and saves {expected.saved_tokens:,}."
    )
    if computed != expected.computed_tokens:
        yield _difference(computed, expected)
    yield _agreement(figures)


def _difference(computed: int, expected: Reuse) -> str:
    """Explain why a wave computed less or more than expected."""
    more = computed - expected.computed_tokens
    if more < 0:
        return (
            f"It saved {-more:,} more: endings such as 'Old King' and 'Old Lord' begin alike, and "
            "reuse goes down to the single token."
        )
    if expected.needs_a_sealed_tail:
        return (
            f"It computed {more:,} more: the system prompt ends in a block that no call fills, "
            "which is found once a call has ended, but not by calls that come at once."
        )
    return f"It computed {more:,} more: the pool was too small to keep all blocks."


def _agreement(figures: Figures) -> str:
    compared, equal = figures.num_compared, figures.num_equal
    if not compared:
        return "No call was answered without a cache in time, so no answers could be compared."
    if equal == compared:
        all_calls = "the one call" if compared == 1 else f"all {compared:,} calls"
        return f"The answers are the same with and without a cache in {all_calls} compared."
    return (
        f"The answers are the same with and without a cache in {equal:,} of {compared:,} calls: "
        "float32 rounds differently in other batches, and two tokens were almost equally likely."
    )


def as_json(results: list[list[Outcome]], figures: Figures) -> dict[str, object]:
    """Return all results as plain values."""
    waves = {"no_cache": figures.no_cache, "cold": figures.cold, "warm": figures.warm}
    return {
        "calls": figures.cold.num_calls,
        "block_size": figures.block_size,
        "examples": [
            {
                "title": example.title,
                "prompts": [
                    asdict(outcome) | {"computed_tokens": outcome.computed_tokens}
                    for outcome in outcomes
                ],
            }
            for example, outcomes in zip(EXAMPLES, results, strict=True)
        ],
        "waves": {
            name: {"answered_calls": len(wave.answers), **attributes(wave, *_COUNTS)}
            for name, wave in waves.items()
        },
        "no_cache_seconds_for_all": figures.no_cache_seconds,
        "first_token": {"cold": asdict(figures.cold_call), "warm": asdict(figures.warm_call)},
        "compared_answers": figures.num_compared,
        "equal_answers": figures.num_equal,
    }


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table: a column of words, then columns of numbers, each wide enough for a time."""
    table = matrix(headings, rows)
    for column in table.columns:
        column.min_width = 17 if column is table.columns[0] else 10
    return table


def _times(slow: float, fast: float) -> Text:
    return Text(f"{slow / fast:.1f} x", style="bold green")
