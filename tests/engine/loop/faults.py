"""Forward passes that raise in the middle, when a test says so.

::

    with sabotage(llm, step=2):
        llm.generate(...)           # the third forward pass raises, its first layer is through
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ostinato import LLM


class Sabotage(Exception):
    """What a sabotaged forward pass raises."""


@contextmanager
def sabotage(llm: LLM, step: int = 0, error: BaseException | None = None) -> Iterator[None]:
    """Make one forward pass raise between its first and its second layer.

    Args:
        llm: Whose; a Llama.
        step: Which one from now on, counted from 0.
        error: What is raised; a ``Sabotage`` if None.
    """
    num_passes = 0

    def raise_in_time(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == step + 1:
            raise error or Sabotage("a layer gave up")

    layer = llm.engine.loaded.model.model.layers[1]
    hook = layer.register_forward_pre_hook(raise_in_time)
    try:
        yield
    finally:
        hook.remove()
    assert num_passes > step, "the forward pass that was to raise never came"
