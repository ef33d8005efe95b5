"""``ostinato simulate``: what caches of other sizes and policies would have hit."""

from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import cast, get_args

from ostinato.cli.options import trace_source as source
from ostinato.cli.options.config_source import load_config
from ostinato.cli.options.cost_options import CostOptions, MachineOptions
from ostinato.cli.options.option_groups import option
from ostinato.cli.output import simulation_output as output
from ostinato.cli.output.report_folder import open_folder
from ostinato.cli.output.tables import print_json, progress_bar
from ostinato.core.config import SchedulerConfig, check_minimum
from ostinato.core.errors import ConfigError
from ostinato.lab.replay.replay import Replay
from ostinato.lab.replay.serial_replay import USUAL_POLICY
from ostinato.lab.replay.tier_model import DiskModel
from ostinato.lab.simulate.simulation import (
    Simulation,
    add_bounds,
    add_disk,
    num_replays,
    simulate,
    usual_capacities,
)
from ostinato.lab.simulate.timed_replay import replay_timed, slowed_to_fit
from ostinato.lab.size.kv_bytes import kv_bytes
from ostinato.lab.size.kv_config import Config
from ostinato.lab.size.quantities import read_bytes, read_count
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.work.cost_model import ASSUMED, StepCost
from ostinato.lab.work.kv_groups import KVGroups, kv_groups
from ostinato.settings import (
    PolicyName,
    PrefixCacheConfig,
    StateConfig,
    WindowConfig,
    check_policy,
)

_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
_CACHE = "Caches"
_timed = partial(option, panel="Times")

_STEP_TOKENS = 8192
_STATE_TOKENS = 64
_MAX_SLOWDOWN = 1_000_000.0


@dataclass(frozen=True)
class TimedOptions:
    """The replay with the scheduler, for times."""

    tier_speed: str = _timed("20k")
    """Tokens per second that it loads, for times."""
    timed_requests: int = _timed(200)
    """Number of requests to run with the scheduler as well, for times; 0 is none."""
    timed_capacity: int | None = _timed(None)
    """Blocks of the cache for that, enough for the longest request at least; else half of what
    these requests need.
    """
    slowdown: float | None = _timed(None)
    """Factor on the gaps between arrivals; by default so that one engine can serve them."""

    def check(self) -> None:
        """Check the options before anything is read.

        Raises:
            ConfigError: One is out of range.
        """
        check_minimum("timed_requests", self.timed_requests, 0)
        if self.timed_capacity is not None:
            check_minimum("timed_capacity", self.timed_capacity, 1)
        factor = 1.0 if self.slowdown is None else self.slowdown
        if not 1 / _MAX_SLOWDOWN <= factor <= _MAX_SLOWDOWN:
            raise ConfigError(
                f"slowdown={factor}: must be above 0, from a millionth to {_MAX_SLOWDOWN:,.0f}"
            )


def run(
    trace: source.TracePath,
    capacity: str | None = option(
        None,
        "Sizes of the cache, with commas: blocks of the trace such as 2k, or memory such as "
        "8GiB where --model says what a token takes.",
        "--capacity",
        "-c",
        panel=_CACHE,
    ),
    policy: str | None = option(
        None,
        f"Which to try, with commas: {', '.join(_POLICIES)}. All by default.",
        "--policy",
        "-p",
        panel=_CACHE,
    ),
    bounds: bool = option(
        True, "Add the upper bound: hits with knowledge of the future.", panel=_CACHE
    ),
    tiers: str | None = option(
        None, "Add a disk of this many blocks behind each cache, such as 20k.", panel=_CACHE
    ),
    model: str | None = option(
        None,
        "A config.json, a directory, a bundled model, or a name on the hub.",
        "--model",
        "-m",
        panel=_CACHE,
    ),
    out: Path | None = option(
        None, "A directory for plots (PNG, SVG) and report.html.", "--out", "-o"
    ),
    as_json: bool = option(False, "Print the results as JSON.", "--json"),
    *,
    timed: TimedOptions,
    reading: source.TraceOptions,
    machine: MachineOptions,
    steps: CostOptions,
) -> None:
    """Replay traffic on the engine's own cache and scheduler: hits, first tokens, occupancy.

    Hits are from a serial replay of every policy and size, with their upper bound. Times are from a
    second replay of the first requests, with a cost model in place of the model.

    Try: ostinato simulate trace.jsonl --out report
    """
    timed.check()
    steps.check(machine)
    traffic, recording = reading.open(trace, model), reading.recording(trace)
    config = None if model is None else load_config(model)
    has_cost = timed.timed_requests or machine.given
    cost = steps.choose(machine, recording, config) if has_cost else ASSUMED
    kv = _groups(traffic, config)
    sizes = _sizes(traffic, capacity, kv)
    policies = _policies(policy)
    disk = _disk(tiers, timed.tier_speed, kv)
    open_folder(out)
    total = len(traffic) * num_replays(len(sizes), len(policies), kv)
    with progress_bar("Hits", total) as advance:
        simulation = simulate(traffic, sizes, policies, advance, kv)
    if disk is not None:
        with progress_bar("Disk", len(traffic) * len(sizes)) as advance:
            add_disk(simulation, disk, advance)
    if bounds:
        with progress_bar("Bounds", 2 * len(traffic) * len(sizes)) as advance:
            add_bounds(simulation, advance)
    if recording is not None:
        simulation.replayed = Replay(recording).run()
    if timed.timed_requests:
        _add_times(simulation, cost, timed)
    if as_json:
        print_json(output.as_json(simulation))
    else:
        output.show(simulation)
    if out is not None:
        output.write(simulation, out)


def _disk(tiers: str | None, tier_speed: str, kv: KVGroups | None) -> DiskModel | None:
    """Return the disk behind the caches, if any.

    Raises:
        ConfigError: A value is invalid, or the model has states, which it does not keep.
    """
    if tiers is None:
        return None
    if kv is not None and kv.state_bytes:
        raise ConfigError(
            f"tiers={tiers!r} with a model with states: the simulated disk does not keep them; "
            "leave out --tiers, or --model"
        )
    speed = float(read_count("tier_speed", tier_speed))
    token_bytes = (1,) if kv is None else (kv.full_bytes, *(size for _, size in kv.windows))
    return DiskModel(read_count("tiers", tiers), speed, token_bytes)


def _groups(trace: BlockTrace, config: Config | None) -> KVGroups | None:
    """Return the KV of a token, if a model or the trace defines it."""
    if config is not None:
        return kv_groups(kv_bytes(config))
    return None if trace.token_bytes is None else KVGroups(trace.token_bytes)


def _sizes(trace: BlockTrace, capacity: str | None, kv: KVGroups | None) -> tuple[int, ...]:
    """Read the sizes of caches, in blocks of the trace.

    Raises:
        ConfigError: One is invalid, or is memory without a model to convert it to blocks.
    """
    if capacity is None:
        return usual_capacities(trace)
    return tuple(_size(each.strip(), trace, kv) for each in capacity.split(","))


def _size(text: str, trace: BlockTrace, kv: KVGroups | None) -> int:
    if not text.lower().endswith("b"):
        try:
            return read_count("capacity", text)
        except ConfigError:
            raise ConfigError(
                f"capacity={text!r}: must be a number of blocks such as 2000 or 2k, or memory such "
                "as 24GiB; several with commas between them"
            ) from None
    memory = read_bytes("capacity", text)
    if kv is None:
        raise ConfigError(
            f"capacity={text!r} is memory, and the size of a token is unknown: add --model, or "
            "give blocks"
        )
    if kv.state_bytes:  # each row shares this memory between blocks and states
        return max(1, kv.blocks(memory, trace.block_tokens)[0])
    return kv.pools(memory, trace.block_tokens).full


def _policies(text: str | None) -> tuple[PolicyName, ...]:
    names = _POLICIES if text is None else tuple(each.strip() for each in text.split(","))
    for name in names:
        check_policy("policy", name)
    return cast("tuple[PolicyName, ...]", tuple(dict.fromkeys(names)))


def _add_times(simulation: Simulation, cost: StepCost, timed: TimedOptions) -> None:
    """Run the first requests with the scheduler, with and without the cache."""
    trace, slowdown = simulation.trace.first(timed.timed_requests), timed.slowdown
    simulation.is_slowed_to_fit = slowdown is None
    simulation.slowdown = slowed_to_fit(simulation.trace, cost) if slowdown is None else slowdown
    simulation.cost_origin = cost.origin
    blocks = _timed_blocks(trace, timed.timed_capacity)
    windows: tuple[WindowConfig, ...] = ()
    if simulation.kv is not None and simulation.kv.windows:
        memory = simulation.kv.memory_for(blocks, trace.block_tokens)
        _, windows = simulation.kv.blocks(memory, trace.block_tokens)
    scheduling = SchedulerConfig(max_num_batched_tokens=_STEP_TOKENS)
    states = _states(simulation.kv, blocks, trace.block_tokens, scheduling)
    runs = _timed_runs(simulation, states is not None)
    with progress_bar("Times", len(trace) * len(runs)) as advance:
        for name, enabled, policy, disk in runs:
            cache = PrefixCacheConfig(
                num_blocks=blocks,
                block_size=trace.block_tokens,
                eviction_policy=policy,
                windows=windows,
                states=states,
                enable_prefix_caching=enabled,
                seal_tails=False,
                keep_explanations=0,
            )
            simulation.timed[name] = replay_timed(
                trace,
                cache,
                scheduling,
                cost,
                slowdown=simulation.slowdown,
                progress=advance,
                disk=disk,
            )


def _timed_blocks(trace: BlockTrace, num_blocks: int | None) -> int:
    """Return the blocks of the timed cache.

    With less, the longest request could not run; more could never be filled.
    """
    lengths = trace.input_tokens + trace.output_tokens
    min_blocks = int(lengths.max()) // trace.block_tokens + 1
    max_blocks = int((lengths // trace.block_tokens + 1).sum())
    return min(max(num_blocks or trace.num_distinct // 2, min_blocks), max_blocks)


def _timed_runs(
    simulation: Simulation, has_states: bool
) -> list[tuple[str, bool, PolicyName, DiskModel | None]]:
    """Return the runs: name, whether there is a cache, its policy, and the disk behind it."""
    runs: list[tuple[str, bool, PolicyName, DiskModel | None]] = [("no cache", False, "lru", None)]
    runs += [(each, True, each, None) for each in _POLICIES if each in simulation.results]
    if simulation.disk is not None and len(runs) > 1:
        usual = USUAL_POLICY if USUAL_POLICY in simulation.results else runs[1][2]
        runs.append((f"{usual} + disk", True, usual, simulation.disk))
    if has_states:
        runs.append(("cache", True, USUAL_POLICY, None))
    return runs


def _states(
    kv: KVGroups | None, num_blocks: int, block_tokens: int, scheduling: SchedulerConfig
) -> StateConfig | None:
    """Give states as much memory as the blocks have, and running sequences theirs besides."""
    if kv is None or not kv.state_bytes:
        return None
    slots = 2 * scheduling.max_num_seqs
    slots += num_blocks * block_tokens * kv.token_bytes // kv.state_bytes
    return StateConfig(slots, lcm(_STATE_TOKENS, block_tokens))
