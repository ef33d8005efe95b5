"""``ostinato simulate``: what would which cache have found of this traffic?"""

import json
import re
from pathlib import Path
from typing import Annotated, cast

import typer

from ostinato.cli import _cost_options as costs
from ostinato.cli import _simulation_output as output
from ostinato.cli import _trace_source as source
from ostinato.cli._config_source import load_config
from ostinato.cli._option_groups import grouped
from ostinato.cli._quantities import read_bytes
from ostinato.cli._report_folder import open_folder
from ostinato.core.config import CacheConfig, PolicyName, SchedulerConfig, at_least, one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.cost_model import CostModel
from ostinato.lab.kv_bytes import kv_bytes
from ostinato.lab.policies import ENGINE_POLICIES, SIMULATED_POLICIES, SimulatedPolicyName
from ostinato.lab.replay import Replay
from ostinato.lab.simulation import Simulation, add_bounds, simulate, usual_capacities
from ostinato.lab.timed_replay import replay_timed, slowed_to_fit

_CACHE = "Caches"
_TIMED = "Times"

_STEP_TOKENS = 8192
_MOST_SLOWDOWN = 1_000_000.0


@grouped
def run(
    trace: source.TracePath,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity",
            "-c",
            help="Sizes of the cache, with commas: blocks of the trace, or memory such as 8GiB "
            "where --model says what a token weighs.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help=f"Which to try, with commas: {', '.join(SIMULATED_POLICIES)}. All unless said.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds/--no-bounds",
            help="Add what could have been found with knowledge of the future.",
            rich_help_panel=_CACHE,
        ),
    ] = True,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A config.json, a directory, an embedded model, or a name on the hub.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    timed_requests: Annotated[
        int,
        typer.Option(
            help="First requests to serve with the scheduler as well, for times; 0 is none.",
            rich_help_panel=_TIMED,
        ),
    ] = 200,
    timed_capacity: Annotated[
        int | None,
        typer.Option(
            help="Blocks of the cache for that, enough for the longest request at least; else "
            "half of what these requests bring.",
            rich_help_panel=_TIMED,
        ),
    ] = None,
    slowdown: Annotated[
        float | None,
        typer.Option(
            help="Stretch the gaps between arrivals by this; else until one engine can serve them.",
            rich_help_panel=_TIMED,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A directory for plots (PNG, SVG) and report.html."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    *,
    reading: source.TraceOptions,
    steps: costs.CostOptions,
) -> None:
    """Replay traffic on the engine's own cache and scheduler: hits, first tokens, occupancy.

    Hits are of a serial replay: every policy, every size, beside what no policy can beat. Times
    are of a second replay, of the first requests, with a cost model in place of the model.

    Try: ostinato simulate trace.jsonl --out report
    """
    at_least("timed_requests", timed_requests, 0)
    if timed_capacity is not None:
        at_least("timed_capacity", timed_capacity, 1)
    if slowdown is not None and not 1 / _MOST_SLOWDOWN <= slowdown <= _MOST_SLOWDOWN:
        raise ConfigError(
            f"slowdown={slowdown}: must be above 0, from a millionth to {_MOST_SLOWDOWN:,.0f}"
        )
    steps.check()
    traffic, recording = reading.open(trace, model), reading.recording(trace)
    cost = steps.choose(recording)
    token_bytes = _token_bytes(traffic, model)
    sizes = _sizes(traffic, capacity, token_bytes)
    policies = _policies(policy)
    open_folder(out)
    total = len(traffic) * (len(sizes) * len(policies) + 1)
    with source.progress_bar("Hits", total) as advance:
        found = simulate(traffic, sizes, policies, advance)
    if bounds:
        with source.progress_bar("Bounds", 2 * len(traffic) * len(sizes)) as advance:
            add_bounds(found, advance)
    if recording is not None:
        found.replayed = Replay(recording).run()
    if timed_requests:
        _add_times(found, cost, timed_requests, timed_capacity, slowdown)
    if as_json:
        typer.echo(json.dumps(output.as_json(found, token_bytes), indent=2))
    else:
        output.show(found, token_bytes)
    if out is not None:
        output.write(found, token_bytes, out)


def _token_bytes(trace: BlockTrace, model: str | None) -> int | None:
    """Say what a token weighs, if anybody knows."""
    return trace.token_bytes if model is None else kv_bytes(load_config(model)).token_bytes


def _sizes(trace: BlockTrace, capacity: str | None, token_bytes: int | None) -> tuple[int, ...]:
    """Read the sizes of caches, in blocks of the trace.

    Raises:
        ConfigError: One is no size, or memory that holds no block or of which nobody knows how
            many blocks it holds.
    """
    if capacity is None:
        return usual_capacities(trace)
    return tuple(_size(each.strip(), trace, token_bytes) for each in capacity.split(","))


def _size(text: str, trace: BlockTrace, token_bytes: int | None) -> int:
    if re.fullmatch(r"-?\d+", text):
        at_least("capacity", int(text), 1)
        return int(text)
    if not text or text[-1].isdigit():  # nobody means 1e3 bytes
        raise ConfigError(
            f"capacity={text!r}: must be a number of blocks, or memory such as 24GiB; several "
            "with commas between them"
        )
    memory = read_bytes("capacity", text)
    if token_bytes is None:
        raise ConfigError(
            f"capacity={text!r} is memory, and nobody knows what a token weighs: add --model, or "
            "give blocks"
        )
    blocks = memory // (token_bytes * trace.block_tokens)
    if not blocks:
        raise ConfigError(
            f"capacity={text!r} holds no block of {trace.block_tokens} tokens of "
            f"{token_bytes:,} bytes: give more"
        )
    return blocks


def _policies(text: str | None) -> tuple[SimulatedPolicyName, ...]:
    names = SIMULATED_POLICIES if text is None else tuple(each.strip() for each in text.split(","))
    for name in names:
        one_of("policy", name, SIMULATED_POLICIES)
    return cast("tuple[SimulatedPolicyName, ...]", tuple(dict.fromkeys(names)))


def _add_times(
    found: Simulation,
    cost: CostModel,
    num_requests: int,
    num_blocks: int | None,
    slowdown: float | None,
) -> None:
    """Serve the first requests with the scheduler, with and without the cache."""
    trace = found.trace.first(num_requests)
    found.is_slowed_to_fit = slowdown is None
    found.slowdown = slowed_to_fit(found.trace, cost) if slowdown is None else slowdown
    found.cost_origin = cost.origin
    blocks = num_blocks or max(1, trace.num_distinct // 2)
    lengths = trace.input_tokens + trace.output_tokens
    least = int(lengths.max()) // trace.block_tokens + 1
    most = int((lengths // trace.block_tokens + 1).sum())
    # Less, and the longest request could not run at all; more could never be filled.
    blocks = min(max(blocks, least), most)
    scheduling = SchedulerConfig(max_num_batched_tokens=_STEP_TOKENS)
    runs: list[tuple[str, bool, PolicyName]] = [("no cache", False, ENGINE_POLICIES[0])]
    runs += [(policy, True, policy) for policy in ENGINE_POLICIES if policy in found.results]
    with source.progress_bar("Times", len(trace) * len(runs)) as advance:
        for name, enabled, policy in runs:
            cache = CacheConfig(
                num_blocks=blocks,
                block_size=trace.block_tokens,
                policy=policy,
                enable_prefix_caching=enabled,
                seal_tails=False,
                keep_explanations=0,
            )
            found.timed[name] = replay_timed(
                trace, cache, scheduling, cost, slowdown=found.slowdown, progress=advance
            )
