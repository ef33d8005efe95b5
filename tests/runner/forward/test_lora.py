"""Low-rank updates by the native library, and in a step: the definition, and the same bits."""

import pytest
import torch

from ostinato.runner.lora import AdapterSegment, LoraAdapter, LoraLayer, StepAdapters
from ostinato.runner.lora_records import add_updates
from ostinato.runner.native.library import Isa
from tests.support.instruction_sets import isa, needs_library

__all__ = ["isa"]

pytestmark = needs_library
NUM_INPUTS, NUM_OUTPUTS, NAME = 43, 37, "layer"


def adapter(rank: int, dtype: torch.dtype) -> LoraAdapter:
    """An adapter of one layer with random weights."""
    down, up = torch.randn(rank, NUM_INPUTS), torch.randn(rank, NUM_OUTPUTS)
    layer = LoraLayer(down.to(dtype), up.to(dtype), 0.5)
    return LoraAdapter(bytes(32), rank, {NAME: layer}, (), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_what_its_definition_says_and_no_row_depends_on_another(
    isa: Isa, dtype: torch.dtype
):
    """Eleven rows: five of one adapter, one of none, four of another, one of none."""
    torch.manual_seed(0)
    first, second = adapter(6, dtype), adapter(1, dtype)
    inputs = torch.randn(11, NUM_INPUTS).to(dtype)
    plain = torch.randn(11, NUM_OUTPUTS).to(dtype)
    outputs = plain.clone()
    step = StepAdapters((AdapterSegment(0, 5, first), AdapterSegment(6, 10, second)))
    add_updates(NAME, inputs, outputs, step)

    wanted = plain.double()
    for segment in step.segments:
        layer, rows = segment.adapter.layers[NAME], slice(segment.first, segment.end)
        update = inputs[rows].double() @ layer.down.double().T @ layer.up.double() * layer.scale
        wanted[rows] += update
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(outputs.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(outputs[[5, 10]], plain[[5, 10]]), "rows of the base model"
    for row in range(5):
        alone = plain[row : row + 1].clone()
        one = StepAdapters((AdapterSegment(0, 1, first),))
        add_updates(NAME, inputs[row : row + 1], alone, one)
        assert torch.equal(alone[0], outputs[row])


def test_segments_follow_the_rows_that_are_kept():
    one = adapter(1, torch.float32)
    step = StepAdapters((AdapterSegment(0, 3, one), AdapterSegment(5, 9, one)))
    kept = step.of_rows(torch.tensor([2, 3, 5, 8, 11]).numpy())
    assert [(s.first, s.end) for s in kept.segments] == [(0, 1), (2, 4)]
