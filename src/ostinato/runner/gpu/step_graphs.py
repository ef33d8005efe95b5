"""Captures steps as CUDA graphs, by the sizes of their tables.

A graph replays the launches of one step: the same kernels at the same addresses with the same
numbers. So everything that a step computes with is either in its tables, at addresses that do not
change, or part of its key. A step runs uncaptured the first time that its key is seen, which also
compiles its kernels; it is captured the second time. Without a capture, as on a CPU, all steps run
uncaptured.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128
"""Captured steps that are kept, the last used ones; together they share one pool of memory."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step computes.

    Attributes:
        logits: Shape (num_logit_rows, vocab_size).
        ids: Sampled ids, -1 where no token can be sampled, shape (num_logit_rows,), int64; None if
            they are not sampled in the step.
    """

    logits: Tensor
    ids: Tensor | None


Step: TypeAlias = Callable[[], StepTensors]
Capture: TypeAlias = Callable[[Step], Step]
"""Records what a step launches; returns what launches it again."""


class StepGraphs:
    """Runs steps, captured where they repeat.

    Attributes:
        num_replays: Steps that were replayed.
    """

    def __init__(self, capture: Capture | None) -> None:
        """Take what captures; None captures nothing."""
        self.num_replays = 0
        self._capture = capture
        self._graphs: OrderedDict[Hashable, Step | None] = OrderedDict()  # None: seen once
        self._is_refused = False

    def run(self, key: Hashable, step: Step) -> StepTensors:
        """Run a step, by replaying an earlier one with its key if there is one."""
        if self._capture is None or self._is_refused:
            return step()
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
            return step()
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = self._capture(step)
            except Exception as error:  # code of any model, which may wait for the device
                self._is_refused = True
                logger.warning("steps are not captured in CUDA graphs: %s", error)
                return step()
        self.num_replays += 1
        return graph()

    def forget(self) -> None:
        """Drop all graphs, before their tables move."""
        self._graphs.clear()


def cuda_capture(device: torch.device) -> Capture:
    """Return what captures steps on a CUDA device, all in one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            result = step()

        def replay() -> StepTensors:
            graph.replay()
            return result

        return replay

    return capture
