"""Packed layers compute what plain ones do, and their weights can be had and replaced."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import pack_linears, stack, unpack_linears
from ostinato.runner.forward.weight_refs import replace_weights, weight_places
from ostinato.runner.native.packed import PackedWeight
from tests.support.instruction_sets import needs_library

pytestmark = needs_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Tied(nn.Module):
    """An embedding that is the head as well, a layer between, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.between = nn.Linear(8, 8)
        self.twins = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.twins[1].weight = self.twins[0].weight
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.between(self.embed(ids))
        for twin in self.twins:
            hidden = twin(hidden)
        return self.head(hidden)


def tied(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype).requires_grad_(False)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by no more than another order of sums explains."""
    unit = 1e-5 if expected.dtype == torch.float32 else 2e-2
    size = float(expected.float().abs().max()) + 1e-3
    return float((found.float() - expected.float()).abs().max()) <= unit * size


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 70),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    num_columns=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_stacked_layers_compute_what_each_computes_alone(
    dtype: torch.dtype, num_tokens: int, sizes: list[int], num_columns: int, seed: int
):
    torch.manual_seed(seed)
    parent = nn.Module()
    names = [f"part{i}" for i in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        setattr(parent, name, nn.Linear(num_columns, size, bias=seed % 2 == 0).to(dtype))
    plain = copy.deepcopy(parent)
    rows = torch.randn(num_tokens, num_columns).to(dtype)

    with torch.no_grad():
        packed = stack(parent, names)
        expected = [plain.get_submodule(name)(rows) for name in names]
        found = [parent.get_submodule(name)(rows) for name in names]

    assert packed.multiply(rows).shape == (num_tokens, sum(sizes))
    if num_tokens:
        assert all(map(close, found, expected))
    for name in names:
        assert torch.equal(parent.get_submodule(name).weight, plain.get_submodule(name).weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_computes_and_says_what_the_plain_one_does(dtype: torch.dtype):
    """The shared layers stay plain; the head is packed beside its embedding."""
    plain, packed = tied(dtype), tied(dtype)

    assert pack_linears(packed) == 2
    assert isinstance(packed.head, PackedLinear) and type(packed.twins[0]) is nn.Linear
    ids = torch.arange(20)[None]
    assert close(packed(ids), plain(ids))
    before, after = plain.state_dict(), packed.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)

    unpack_linears(packed)
    assert type(packed.head) is nn.Linear and packed.head.weight is packed.embed.weight
    assert torch.equal(packed(ids), plain(ids))


def test_the_plain_weight_is_gone():
    """What is left of a layer's weight is the packed one."""
    model = tied()
    pack_linears(model)

    assert {name for name, _ in model.named_parameters()} == {
        "embed.weight",
        "between.bias",
        "twins.0.weight",
    }


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "between.weight", "between.bias"])
@pytest.mark.parametrize("way", ["load_state_dict", "replace_weights"])
def test_a_replaced_weight_is_computed_with(name: str, way: str):
    """Whichever of a tied pair is named, both change."""
    plain, packed = tied(), tied()
    pack_linears(packed)
    update = {name: -2 * plain.state_dict()[name]}

    plain.load_state_dict(update, strict=False)
    if way == "load_state_dict":
        packed.load_state_dict(update, strict=False)
    else:
        replace_weights(packed, update)

    assert close(packed(torch.arange(20)[None]), plain(torch.arange(20)[None]))
    found = packed.state_dict()
    assert all(torch.equal(found[n], tensor) for n, tensor in plain.state_dict().items())


def test_places_are_those_of_the_state_dict_and_ties_show():
    model = tied()
    expected = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    for prepare in (lambda: 0, lambda: pack_linears(model)):
        prepare()
        places = weight_places(model)
        assert {name: (p.shape, p.dtype) for name, p in places.items()} == expected
        assert places["embed.weight"].home == places["head.weight"].home
        assert len({place.home for place in places.values()}) == len(places) - 2


def test_layers_with_hooks_stay_plain():
    """Their hooks would not be called."""
    model = tied()
    model.between.register_forward_hook(lambda *_: None)

    assert pack_linears(model) == 1


def test_some_rows_of_a_packed_weight_can_be_replaced():
    plain = torch.randn(12, 5)
    packed = PackedWeight([plain[:4], plain[4:]])

    packed.replace(4, torch.zeros(3, 5))

    assert torch.equal(packed.plain()[:4], plain[:4])
    assert not packed.plain()[4:7].any()
    assert torch.equal(packed.plain()[7:], plain[7:])
