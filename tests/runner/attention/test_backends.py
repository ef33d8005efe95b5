"""What every backend must pass: formats, strides, the order of a layer's work, and large scores.

The store is NaN wherever the step may not look, so that a look shows.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.core.ids import SlotId
from ostinato.core.plan import CopyRun
from ostinato.runner.attention.backend import AttentionBackend, AttentionStyle
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import SHARING, ScratchLimits, TorchAttention
from ostinato.runner.gpu.backend import TritonAttention
from ostinato.runner.native.library import library
from tests.runner.attention.scene import Scene, Shape
from tests.support.instruction_sets import needs_library
from tests.support.triton import needs_triton

PLAIN = AttentionStyle(scale=1.0)


def native() -> AttentionBackend:
    loaded = library()
    assert loaded is not None
    return NativeAttention(loaded, "always")


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch": lambda: TorchAttention(ScratchLimits(gather_bytes=400), SHARING["always"]),
    "native": native,
    "triton": lambda: TritonAttention("always"),
}
MARKS = {"native": needs_library, "triton": needs_triton}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


def assert_expected(
    found: Tensor, scene: Scene, style: AttentionStyle = PLAIN, near: float = 1e-4
) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), scene.expected(style), rtol=near, atol=near)


@pytest.mark.parametrize(("kv_dtype", "near"), [(torch.float16, 4e-3), (torch.int8, 2e-3)])
def test_a_store_of_another_format_is_read_back_rounded(
    backend: AttentionBackend, kv_dtype: torch.dtype, near: float
):
    """New tokens as well: they are read from the store, so that a hit gives what a miss gave."""
    shape = Shape(((5, 3), (0, 4), (40, 1)), group=2, block_size=16)
    scene = Scene(shape, torch.float32, backend, kv_dtype=kv_dtype)

    found = scene.attend(PLAIN)

    if kv_dtype == torch.int8:
        scene.keep_in_codes()
    else:
        scene.whole = [(k.half().float(), v.half().float()) for k, v in scene.whole]
    assert_expected(found, scene, near=near)


def as_views(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Queries, keys and values as one product leaves them."""
    return torch.cat(rows, dim=1).split([each.shape[1] for each in rows], dim=1)


def with_gaps(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Rows whose elements are apart."""
    return tuple(each.transpose(0, 2).contiguous().transpose(0, 2) for each in rows)


@pytest.mark.parametrize("laid", [as_views, with_gaps])
def test_rows_come_in_any_strides(
    backend: AttentionBackend, laid: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
):
    scene = Scene(Shape(((20, 3), (4, 1)), group=2, block_size=16), torch.float32, backend)
    queries, keys, values = laid((scene.queries, *scene.new_rows()))
    assert not keys.is_contiguous()

    step = backend.start(scene.metadata(), scene.store)

    assert_expected(step.attend(0, queries, keys, values, PLAIN), scene)


def test_copies_come_after_the_writes_and_before_the_reads_of_a_layer(backend: AttentionBackend):
    """The second sequence's cached tokens are copied from what the first one writes."""
    scene = Scene(Shape(((0, 4), (3, 2)), block_size=16), torch.float32, backend)
    leader, follower = scene.tables
    for own, other in zip(scene.whole[1], scene.whole[0], strict=True):
        own[:3] = other[:3]
    scene.poison()
    copy = CopyRun(SlotId(leader[0] * 16), SlotId(follower[0] * 16), 3)

    assert_expected(scene.attend(PLAIN, copies=(copy,)), scene)


def test_large_scores_do_not_overflow(backend: AttentionBackend):
    """Softmax is taken relative to the largest score, also across tiles."""
    scene = Scene(Shape(((40, 2),), group=2, block_size=16), torch.float32, backend)
    style = AttentionStyle(scale=1e4, soft_cap=2e4)

    assert_expected(scene.attend(style), scene, style, 1e-3)
