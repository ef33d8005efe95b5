"""One token through the gated delta rule, as float64 has it; other slots stay as they were."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.runner.native.delta import delta_step, takes
from ostinato.runner.native.library import library

NATIVE = library()
pytestmark = pytest.mark.usefixtures("isa")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def gates(num_sequences: int, num_heads: int) -> tuple[Tensor, Tensor]:
    shape = num_sequences, num_heads
    return draw(*shape, seed=1).sigmoid(), draw(*shape).sigmoid()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 8), (24, 37), (128, 128)])
def test_states_fade_are_corrected_and_read(key_dim: int, value_dim: int):
    """Two keys for six heads; three of seven slots, in no order."""
    assert NATIVE is not None
    states, slots = draw(7, 6, key_dim, value_dim, seed=2), torch.tensor([5, 0, 3])
    queries, keys = draw(3, 2, key_dim, seed=3), draw(3, 2, key_dim, seed=4) / key_dim**0.5
    values, (decays, betas) = draw(3, 6, value_dim, seed=5), gates(3, 6)
    before = states.double()

    found = delta_step(NATIVE, states, slots, (queries, keys, values), (decays, betas))

    wide = [each.double().repeat_interleave(3, dim=1)[..., None] for each in (queries, keys)]
    faded = before[slots] * decays.double()[..., None, None]
    error = values.double() - (faded * wide[1]).sum(dim=2)
    expected = faded + wide[1] * (error * betas.double()[..., None])[:, :, None]
    torch.testing.assert_close(states[slots].double(), expected, rtol=1e-5, atol=1e-5)
    read = (expected * wide[0]).sum(dim=2)
    torch.testing.assert_close(found.double(), read, rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(7) if slot not in slots.tolist()]
    assert torch.equal(states[others].double(), before[others])


def test_a_sequence_gets_the_same_bits_alone_and_among_others():
    assert NATIVE is not None
    pool, slots = draw(9, 4, 16, 40, seed=6), torch.arange(8).flip(0)
    heads = draw(8, 4, 16, seed=7), draw(8, 4, 16, seed=8) / 4, draw(8, 4, 40, seed=9)
    both = gates(8, 4)
    together = pool.clone()
    all_read = delta_step(NATIVE, together, slots, heads, both)

    for row in range(8):
        one = slice(row, row + 1)
        read = delta_step(
            NATIVE, pool, slots[one], tuple(h[one] for h in heads), tuple(g[one] for g in both)
        )
        assert torch.equal(read, all_read[one])
    assert torch.equal(pool, together)


def test_other_formats_are_left_to_torch():
    states = torch.zeros(2, 1, 4, 4)
    assert takes(states, torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    assert not takes(states, torch.zeros(1, 1, 4, dtype=torch.float64))
    assert not takes(states.double(), torch.zeros(1, 1, 4))
    assert not takes(states[:, :, ::2], torch.zeros(1, 1, 4))
