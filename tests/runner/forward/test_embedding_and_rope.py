"""Vectors and angles out of tables are what the model's own modules give."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ostinato.runner.forward.embedding_and_rope import Angles, Lookup, look_up_embeddings
from ostinato.runner.inputs import Ints
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.angles import ExactFunctions, settle_frequencies
from tests.support.models.checkpoints import Checkpoints

STEADY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
POSITIONS = np.array([0, 200, 3, 3, 77, 255])


def rotary_of(checkpoints: Checkpoints, kind: str, **parameters: Any) -> nn.Module:
    rope = {"rope_type": kind, "rope_theta": 1e4, **parameters}
    loaded = load_model(checkpoints.path("llama", rope_parameters=rope), "float32", forward="plain")
    rotary: nn.Module = loaded.model.model.rotary_emb
    return rotary


def own_angles(rotary: nn.Module, like: Tensor, positions: Ints) -> Tensor:
    """Those of the first half of a head, which the other half repeats."""
    with ExactFunctions():
        cosines, sines = rotary(like, torch.from_numpy(positions)[None])
    half = cosines.shape[-1] // 2
    return torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STEADY)
def test_angles_are_the_modules_to_the_bit(checkpoints: Checkpoints, kind: str, dtype: torch.dtype):
    rotary, like = rotary_of(checkpoints, kind, **STEADY[kind]), torch.empty(0, dtype=dtype)
    found = Angles(rotary, like).of(POSITIONS)
    assert len(found.table) > len(POSITIONS), "out of a table"
    assert torch.equal(found.rows(), own_angles(rotary, like, POSITIONS))


def test_cosines_and_sines_are_rounded_right_where_torch_rounds_nearly_so():
    """Small angles, large ones, both signs, and those near quarters of a turn."""
    angles = torch.linspace(-70000.0, 70000.0, 60001) + torch.linspace(0.0, 1.0, 60001)
    angles = torch.cat((angles, torch.arange(2000) * (torch.pi / 2), angles / 1e6))
    with ExactFunctions():
        cosines, sines = angles.cos(), torch.sin(angles)

    assert torch.equal(cosines, angles.double().cos().float())
    assert torch.equal(sines, angles.double().sin().float())


def test_what_is_no_angle_stays_with_torch():
    """Angles beyond a million, other formats, and numbers that are none."""
    with ExactFunctions():
        assert torch.tensor([torch.nan]).cos().isnan().all()
        assert torch.equal(torch.tensor([3e7]).sin(), torch.sin(torch.tensor([3e7])))
        assert torch.tensor([1.0], dtype=torch.float64).cos().dtype == torch.float64


def test_frequencies_become_powers_that_are_rounded_right(checkpoints: Checkpoints):
    """The powers of torch differ from one instruction set to the next."""
    rotary: Any = rotary_of(checkpoints, "default")
    rotary.inv_freq = type(rotary)(rotary.config).inv_freq
    settle_frequencies(rotary)

    dim, base = 2 * len(rotary.inv_freq), Decimal(10000)
    shares = (torch.arange(0, dim, 2).float() / dim).tolist()
    powers = torch.tensor([float(base ** Decimal(share)) for share in shares])
    assert torch.equal(rotary.inv_freq, 1.0 / powers)


def test_frequencies_that_a_file_changed_stay_as_they_are(checkpoints: Checkpoints):
    rotary: Any = rotary_of(checkpoints, "default")
    rotary.inv_freq = changed = rotary.inv_freq / 3
    settle_frequencies(rotary)
    assert torch.equal(rotary.inv_freq, changed)


def test_a_longer_text_gets_a_longer_table(checkpoints: Checkpoints):
    rotary, like = rotary_of(checkpoints, "default"), torch.empty(0)
    angles, far = Angles(rotary, like), np.array([4095, 4096, 9000])
    first = angles.of(POSITIONS)
    assert angles.of(POSITIONS).table is first.table
    second = angles.of(far)
    assert len(second.table) > 9000 > len(first.table)
    assert torch.equal(second.rows(), own_angles(rotary, like, far))
    assert angles.of(POSITIONS).table is second.table


def test_angles_that_hang_on_the_longest_text_come_from_the_module(checkpoints: Checkpoints):
    rotary, like = rotary_of(checkpoints, "dynamic", factor=2.0), torch.empty(0)
    angles, long = Angles(rotary, like), np.arange(400)
    for positions in (POSITIONS, long, POSITIONS, long):
        assert torch.equal(angles.of(positions).rows(), own_angles(rotary, like, positions))
    short_of_long = angles.of(long).rows()[:200]
    assert not torch.equal(short_of_long, angles.of(long[:200]).rows()), "so a table would err"


def test_vectors_are_rows_of_the_weight_itself():
    embedding = nn.Embedding(7, 3)
    found = look_up_embeddings(embedding, np.array([6, 0, 6]))
    assert found.table.data_ptr() == embedding.weight.data_ptr()
    assert torch.equal(found.rows(), embedding(torch.tensor([6, 0, 6])))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_the_embedding_sees_every_token(hook: str):
    embedding, seen = nn.Embedding(7, 3), []
    getattr(embedding, hook)(lambda _module, given, *_: seen.append(given[0].tolist()))
    ids = np.array([6, 0, 6])
    found = look_up_embeddings(embedding, ids)
    assert seen == [[[6, 0, 6]]]
    assert torch.equal(found.rows(), embedding.weight[ids])


@pytest.mark.parametrize("place", [-1, 7])
def test_what_is_no_row_of_a_table_is_refused(place: int):
    with pytest.raises(IndexError, match=f"{place}.*7"):
        Lookup.of(torch.zeros(7, 3), np.array(sorted([0, place, 1])))
