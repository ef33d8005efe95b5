"""A session: which engine is measured when, and for how long.

::

    measure 1   prepare A  prepare B  prepare C
                A B C   B C A   C A B            one sample each, repetition by repetition
    measure 2   ...

A worker is started when the first measure needs it and ended after the last one. All engines give
the same number of samples: one that took longer than the limit makes its repetition the last of
that measure for all. An engine that does not answer, or answers with an error, is out of that
measure; what was left out is said.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import (
    Engine,
    environment_of,
    http_worker_of,
)
from benchmarks.peers.machine import Moment, available_gib
from benchmarks.peers.measures import VARIANTS, Measure
from benchmarks.peers.processes import NotSupported, WorkerFailed, WorkerProcess
from benchmarks.peers.protocol import Served, Talk
from benchmarks.peers.samples import Draw, Sizes

NEEDED_GIB = 4.0
"""Free memory besides the weights without which no engine is started: KV and room to work."""

_FILL_S = 60.0
"""How long an engine's memory is filled before it is measured."""


@dataclass(frozen=True)
class Plan:
    """What a session is asked to do.

    Attributes:
        measures: In order.
        engines: With the Python of each.
        sizes: How much of everything.
        model: The checkpoint.
        vocab_size: Of the checkpoint.
        text: Tokens that prompts are pieces of; without them, prompts are drawn at random.
        settings: For every worker.
        repetitions: Samples per engine and measure.
        limit_s: A sample that takes longer is the last.
        timeout_s: How long an answer is waited for.
        budget_s: Once it is spent, one sample has to do.
        folder: Where logs of workers go.
        needed_gib: Free memory without which no engine is started.
        seed: Of the prompts.
    """

    measures: list[Measure]
    engines: dict[Engine, Path]
    sizes: Sizes
    model: Path
    vocab_size: int
    settings: dict[str, Any]
    repetitions: int
    limit_s: float
    timeout_s: float
    budget_s: float
    folder: Path
    needed_gib: float = NEEDED_GIB
    seed: int = 0
    text: Sequence[int] = ()

    def engines_of(self, measure: Measure) -> list[Engine]:
        """Who takes part in a measure."""
        able = [engine for engine in self.engines if _is_able(engine, measure)]
        return [engine for engine in able if engine.base not in measure.without]

    def left_out_of(self, measure: Measure) -> dict[str, str]:
        """Who is not asked although installed, and why not."""
        able = [engine for engine in self.engines if _is_able(engine, measure)]
        without = measure.without
        return {each.name: without[each.base] for each in able if each.base in without}

    def draw(self, *seed: Any) -> Draw:
        """Draw prompts; the same for every engine."""
        return Draw(self.vocab_size, self.seed, *seed, text=self.text)


def _turned(engines: list[Engine], number: int) -> list[Engine]:
    """The engines, beginning with another one each time."""
    place = number % max(1, len(engines))
    return engines[place:] + engines[:place]


def _is_able(engine: Engine, measure: Measure) -> bool:
    if engine.kind != measure.kind:
        return False
    return engine.name not in VARIANTS or engine.name in measure.variants


@dataclass
class Findings:
    """What a session has found so far.

    Attributes:
        engines: By name: title, version, settings, seconds to load, and the tokens that it
            answered to the first prompts with.
        samples: By measure and engine: value, seconds, CPU seconds of the engine, cores that others
            took meanwhile, and cached prompt tokens of its last question, where the engine says.
        left_out: By measure and engine: why there is nothing, or less than was asked for.
    """

    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)


class Asked:
    """A worker while a measure asks it; adds up what its questions took."""

    def __init__(self, process: WorkerProcess, timeout_s: float) -> None:
        """Nothing is asked yet."""
        self.process, self.timeout_s = process, timeout_s
        self.seconds = self.cpu_s = self.taken_s = 0.0
        self.num_cached_tokens: int | None = None

    @property
    def others(self) -> float:
        """Cores that others took, over all questions: a clock of 10 ms is too coarse for one."""
        return max(0.0, self.taken_s - self.cpu_s) / max(self.seconds, 0.01)

    def serve(self, talks: list[Talk]) -> Served:
        """See ``samples.Asked``."""
        answer = self._ask({"do": "serve", "talks": talks})
        served = Served(**{part.name: answer[part.name] for part in fields(Served)})
        if served.cached is not None:
            self.num_cached_tokens = sum(served.cached)
        return served

    def manage(self, scene: str, size: dict[str, int]) -> float:
        """See ``samples.Asked``."""
        seconds: float = self._ask({"do": "manage", "scene": scene, "size": size})["seconds"]
        return seconds

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        start, own = Moment.read(), self.process.cpu_seconds()
        answer = self.process.ask(question, self.timeout_s)
        end = Moment.read()
        self.seconds += end.wall_s - start.wall_s
        self.cpu_s += self.process.cpu_seconds() - own
        self.taken_s += start.taken_until(end)
        return answer


class Session:
    """Goes through a plan; ``found`` grows on the way."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """Start nothing yet; ``say`` gets a line for everything that happens."""
        self.plan, self.say, self.findings = plan, say, Findings()
        self._running: dict[Engine, WorkerProcess] = {}
        self._broken: dict[Engine, str] = {}
        self._start = time.monotonic()

    def run(self, after_measure: Callable[[Findings], None]) -> Findings:
        """Take all measures; what was found is handed over after each."""
        try:
            for place, measure in enumerate(self.plan.measures):
                self._take(measure)
                after_measure(self.findings)
                later = self.plan.measures[place + 1 :]
                needed = {engine for each in later for engine in self.plan.engines_of(each)}
                self._end(set(self._running) - needed)
        finally:
            self._end(set(self._running))
        return self.findings

    def _take(self, measure: Measure) -> None:
        self.say(f"{measure.title} [{measure.unit}]")
        self.findings.samples[measure.name] = {}
        self.findings.left_out[measure.name] = self.plan.left_out_of(measure)
        prefixes: dict[Engine, list[int]] = {}
        for engine in self.plan.engines_of(measure):
            prefix = self._guarded(engine, measure, partial(self._prepare, engine, measure))
            if prefix is not None:
                prefixes[engine] = prefix
        for number in range(self.plan.repetitions):
            if self._is_enough(measure, number):
                break
            for engine in _turned(list(prefixes), number):
                sample = partial(self._sample, engine, measure, number, prefixes[engine])
                self._guarded(engine, measure, sample)

    def _prepare(self, engine: Engine, measure: Measure) -> list[int]:
        process = self._worker(engine)
        if measure.prepare is None:
            return []
        draw = self.plan.draw(measure.name, "prepare")
        return measure.prepare(Asked(process, self.plan.timeout_s), draw, self.plan.sizes)

    def _sample(self, engine: Engine, measure: Measure, number: int, prefix: list[int]) -> None:
        asked = Asked(self._running[engine], self.plan.timeout_s)
        draw = self.plan.draw(measure.name, number)
        value = measure.sample(asked, draw, self.plan.sizes, prefix)
        sample = {
            "value": value,
            "seconds": asked.seconds,
            "cpu_s": asked.cpu_s,
            "others": asked.others,
            "cached": asked.num_cached_tokens,
        }
        self.findings.samples[measure.name].setdefault(engine.name, []).append(sample)
        self.say(f"  {engine.name:16} {value:12.4g}   {asked.others:.2f} cores taken by others")

    def _guarded(self, engine: Engine, measure: Measure, do: Callable[[], Any]) -> Any:
        """Do it; if that fails, note why, and the engine is out of the rest of the measure."""
        left_out = self.findings.left_out[measure.name]
        if engine in self._broken:
            left_out[engine.name] = self._broken[engine]
        if engine.name in left_out:
            return None
        try:
            return do()
        except NotSupported as reason:
            left_out[engine.name] = str(reason)
        except WorkerFailed as reason:
            left_out[engine.name] = str(reason)
            if engine.name not in self.findings.engines:  # it has never come up, so it will not
                self._broken[engine] = str(reason)
            self._end({engine})
        self.say(f"  {engine.name:16} left out: {left_out[engine.name]}")
        return None

    def _is_enough(self, measure: Measure, number: int) -> bool:
        """Say whether a measure ends before its time, for all engines alike."""
        taken = self.findings.samples[measure.name]
        if not number or not taken or measure.kind == "manage":
            return False
        slowest, name = max(
            (max(sample["seconds"] for sample in samples), name) for name, samples in taken.items()
        )
        if slowest > self.plan.limit_s:
            reason = f"a sample took {slowest:.0f} s ({name}), limit {self.plan.limit_s:.0f} s"
        elif time.monotonic() - self._start > self.plan.budget_s:
            reason = f"the budget of {self.plan.budget_s / 60:.0f} minutes was spent"
        else:
            return False
        for engine in taken:
            word = f"{number} of {self.plan.repetitions} repetitions: {reason}"
            self.findings.left_out[measure.name].setdefault(engine, word)
        return True

    def _worker(self, engine: Engine) -> WorkerProcess:
        """Return the engine's worker, loaded and warm; starts it if it does not run.

        Raises:
            WorkerFailed: It cannot be started.
        """
        if engine in self._running:
            return self._running[engine]
        if available_gib() < self.plan.needed_gib:
            raise WorkerFailed(
                f"{available_gib():.1f} GiB are free, and {self.plan.needed_gib} are asked for"
            )
        python, threads, server = self.plan.engines[engine], self.plan.settings["threads"], {}
        environment = environment_of(engine, python, threads)
        if engine.kind == "http":
            python, environment, server = http_worker_of(engine, python, threads)
        log = self.plan.folder / f"{engine.name.replace(':', '-')}.log"
        process = WorkerProcess(engine.worker, python, environment, log)
        self._running[engine] = process
        settings = {**self.plan.settings, **engine.settings, **server}
        question = {"do": "load", "model": str(self.plan.model), "settings": settings}
        start = time.monotonic()
        answer = process.ask(question, 4 * self.plan.timeout_s)
        load_s = time.monotonic() - start
        outputs = [] if engine.kind == "manage" else self._warm_up(process)
        self.findings.engines[engine.name] = {
            "title": engine.title, "load_s": load_s, "first_outputs": outputs, **answer
        }  # fmt: skip
        self.say(f"  {engine.name:16} {answer['version']}, loaded in {load_s:.0f} s")
        if "path" in answer:
            self.say(f"  {'':16} computes in {answer['path']}")
        return process

    def _warm_up(self, process: WorkerProcess) -> list[list[int]]:
        """Serve a few short prompts, whose answers can be compared, and long ones.

        Long ones fill the memory for keys and values once, within a minute at most: some engines
        take it when they start and others as it is first written, and a server that has been
        running for a while has it either way.
        """
        draw = self.plan.draw("warm up")
        asked = Asked(process, self.plan.timeout_s)
        outputs = asked.serve([[(draw(48), 12)] for _ in range(4)]).outputs
        left, start = self.plan.settings["kv_tokens"], time.monotonic()
        while left > 0 and time.monotonic() - start < _FILL_S:
            length = min(self.plan.sizes.prefix, left)
            asked.serve([[(draw(length), 4)]])
            left -= length
        return outputs

    def _end(self, engines: set[Engine]) -> None:
        for engine in engines & set(self._running):
            self._running.pop(engine).end()
