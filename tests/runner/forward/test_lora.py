"""Low-rank updates by the native library, and in a step: the definition, and the same bits."""

import pytest
import torch

from ostinato.runner.adapters.lora import (
    AdapterSegment,
    LoraAdapter,
    LoraLayer,
    StepAdapters,
    pack_layers,
)
from ostinato.runner.adapters.lora_updates import add_updates
from ostinato.runner.native.library import Isa
from tests.support.instruction_sets import isa, needs_library

__all__ = ["isa"]

pytestmark = needs_library
NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS, NAME = 70, 43, 301, "layer"


def plain_layer(rank: int, dtype: torch.dtype) -> LoraLayer:
    down, up = torch.randn(rank, NUM_INPUTS), torch.randn(NUM_OUTPUTS, rank)
    return LoraLayer(down.to(dtype), up.to(dtype), 0.5)


def adapter(layer: LoraLayer) -> LoraAdapter:
    return LoraAdapter(bytes(32), len(layer.down), pack_layers({NAME: layer}), (), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_what_its_definition_says_and_no_row_depends_on_another(isa: Isa, dtype):
    """Rows of one adapter, also where they are apart, of another, and of none."""
    torch.manual_seed(0)
    layers = [plain_layer(rank, dtype) for rank in (6, 40)]
    first, second = map(adapter, layers)
    inputs = torch.randn(NUM_ROWS, NUM_INPUTS).to(dtype)
    plain = torch.randn(NUM_ROWS, NUM_OUTPUTS).to(dtype)
    outputs = plain.clone()
    spans = [(0, 5, first), (6, 10, second), (12, NUM_ROWS, first)]
    add_updates(NAME, inputs, outputs, StepAdapters(tuple(AdapterSegment(*s) for s in spans)))

    wanted = plain.double()
    for (begin, end, _), layer in zip(spans, (*layers, layers[0]), strict=True):
        layer = LoraLayer(layer.down.double(), layer.up.double(), layer.scale)
        layer.add(inputs.double(), wanted, torch.arange(begin, end))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(outputs.double(), wanted, rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(outputs[[5, 10, 11]], plain[[5, 10, 11]]), "rows of the base model"
    for row, used in ((0, first), (4, first), (8, second), (13, first), (69, first)):
        alone = plain[row : row + 1].clone()
        add_updates(NAME, inputs[row:][:1], alone, StepAdapters((AdapterSegment(0, 1, used),)))
        assert torch.equal(alone[0], outputs[row])


def test_segments_follow_the_rows_that_are_kept():
    one = adapter(plain_layer(1, torch.float32))
    step = StepAdapters((AdapterSegment(0, 3, one), AdapterSegment(5, 9, one)))
    kept = step.of_rows(torch.tensor([2, 3, 5, 8, 11]).numpy())
    assert [(s.first, s.end) for s in kept.segments] == [(0, 1), (2, 4)]
    assert [rows.tolist() for rows in step.rows_of_each().values()] == [[0, 1, 2, 5, 6, 7, 8]]
