"""The first layer of a model in a decode step, taken while the model computes it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ostinato.cli.demonstration.demo_waves import calls
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.engine.loop.engine import Engine
    from ostinato.runner.attention.backend import AttentionStyle, GroupedStep

NUM_SEQUENCES = 16
_OUTPUT_TOKENS = 64  # so that no sequence has ended when the last one begins to decode
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """What attention sees in one layer of one step.

    Attributes:
        arrays: ``q``, ``k``, ``v``, ``tables`` and ``lengths``, as ``labs.real_layer`` reads them.
        num_table_blocks: Blocks in all tables.
        num_read: Blocks that the engine's own plan reads, each shared run once.
        num_tokens: Keys of the longest sequence.
    """

    arrays: dict[str, npt.NDArray[Any]]
    num_table_blocks: int
    num_read: int
    num_tokens: int

    def save(self, path: Path) -> None:
        """Write the arrays."""
        np.savez(path, **self.arrays)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Recorder:
    """Passes attention on, and keeps the queries of the first layer."""

    step: "GroupedStep"
    states: None = None
    queries: list[Any] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        queries: "Tensor",
        keys: "Tensor",
        values: "Tensor",
        style: "AttentionStyle",
    ) -> "Tensor":
        """Attend as the engine does."""
        if layer == 0:
            self.queries.append(queries.double().numpy().copy())
        return self.step.attend(layer, queries, keys, values, style)


def capture(model: str) -> CapturedLayer:
    """Serve prompts that share a prefix up to their first tokens, and plan one step more."""
    from ostinato.engine.loop.engine import Engine
    from ostinato.engine.requests.prompts import Prompt

    settings = {"dtype": "float32", "attention": "torch", "forward": "plain", "num_blocks": 256}
    engine = Engine(EngineConfig.of(model, settings | {"block_size": _BLOCK_SIZE}))
    params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    for text in calls(NUM_SEQUENCES):
        engine.add(engine.make_request(Prompt(text=text), params))
    while any(one.num_uncomputed > 1 for one in _live(engine)):
        engine.step()
    return _capture_step(engine)


def _live(engine: "Engine") -> list[Any]:
    requests = engine.scheduler.requests
    return [*requests.waiting, *requests.running]


def _capture_step(engine: "Engine") -> CapturedLayer:
    """Plan a step of decodes, compute it, and keep what the first layer saw."""
    import torch

    from ostinato.runner.attention.backend import GroupedStep
    from ostinato.runner.attention.shared_runs import shared_runs
    from ostinato.runner.inputs import build_inputs

    plan, runner = engine.scheduler.plan(), engine.runner
    inputs = build_inputs(plan, _BLOCK_SIZE, engine.loaded.device)
    [metadata], [store] = inputs.groups, runner.kv_stores
    step = GroupedStep((runner.attention.start(metadata, store),), runner.groups.of_layer)
    recorder = _Recorder(step)
    with torch.inference_mode():
        engine.loaded.call(inputs.input_ids, inputs.position_ids, recorder, inputs.logit_rows)
        blocks = torch.arange(store.num_blocks)[:, None]
        keys, values = (x.double().numpy() for x in store.gather(0, blocks))
    tables = [list(one.tables[0]) for one in plan.sequences]
    lengths = [one.end for one in plan.sequences]
    width = max(map(len, tables))
    runs = shared_runs(metadata, lambda *_: True)
    saved = sum(run.num_blocks * (len(run.sequences) - 1) for run in runs)
    engine.scheduler.fail()
    num_blocks = sum(map(len, tables))
    return CapturedLayer(
        {
            "q": recorder.queries[0], "k": keys, "v": values,
            "tables": np.array([table + [-1] * (width - len(table)) for table in tables]),
            "lengths": np.array(lengths),
        },
        num_blocks,
        num_blocks - saved,
        max(lengths),
    )  # fmt: skip
