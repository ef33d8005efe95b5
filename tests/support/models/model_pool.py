"""Loaded models that one engine after another uses: a test's engine starts in milliseconds.

To load a tiny model takes half a second, since its attention and its forward are compared with
those of ``transformers``. Rooms whose subject is not the loading import these in ``conftest.py``::

    from tests.support.models.model_pool import pooled_models, use_pool

An engine has its model to itself. It gets one that no engine in use has, which was loaded with the
same arguments from the same files for the same instruction set, and in which no weight and no hook
has changed since. Engines of fixtures of a module or a session keep theirs until they are
collected; the others end with their test.
"""

import copy
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
from torch import Tensor, nn

from ostinato.engine.loop import engine as engine_file
from ostinato.engine.settings import setup as setup_file
from ostinato.engine.settings import weights as weights_file
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.setup import ModelSetup, set_up
from ostinato.runner.checkpoints.model_resolver import resolve_model
from ostinato.runner.forward.weight_refs import replace_weights
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading import load_memory
from ostinato.runner.model_call import ModelCall
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.library import current_isa, library

_APART = ("name", "revision", "kv_bytes", "weight_cache_bytes")
"""Arguments of ``load_model`` that are looked at by themselves, or do not change the model."""

MAX_BYTES = 2**25
"""Weights of the largest model that is kept."""

MAX_KV_BYTES = 2**30
"""Keys and values beside which a model is surely loaded."""


def _state(model: nn.Module) -> tuple[int, int]:
    """Return what changes with a weight that is written in place, and with a hook."""
    versions = sum(tensor._version for tensor in model.parameters())
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
    return versions, hooks


@dataclass(eq=False)
class _Entry:
    """A model, and what it was like when it was new."""

    loaded: LoadedModel
    state: tuple[int, int]
    is_spoiled: bool = False


class ModelPool:
    """Keeps the models of engines that have ended."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[_Entry]] = defaultdict(list)
        self.lent: dict[int | None, tuple[Hashable, _Entry]] = {}
        self._numbers = itertools.count()
        self._of_thread = threading.local()

    def set_up(self, config: EngineConfig) -> ModelSetup:
        """Set an engine up; its model comes back when its runner is collected."""
        self._of_thread.taken = None
        try:
            setup = set_up(config)
        except BaseException:
            self._give_back(self._of_thread.taken)
            raise
        weakref.finalize(setup.runner, self._give_back, self._of_thread.taken)
        return setup

    def load(self, name: Any, *arguments: Any) -> LoadedModel:
        """Lend a model, or load one."""
        given = signature(load_model).bind(name, *arguments).arguments
        revision, kv_bytes = given["revision"], given["kv_bytes"]
        if revision is not None:
            return load_model(name, *arguments)
        key = _key(name, tuple(v for k, v in given.items() if k not in _APART))
        entry = self._unchanged(key)
        if entry and kv_bytes(entry.loaded.kv_spec, entry.loaded.dtype) > MAX_KV_BYTES:
            entry = None  # to load it may be refused
        if entry is None:
            loaded = load_model(name, *arguments)
            is_large = loaded.size.num_bytes > MAX_BYTES
            if is_large or loaded.vision is not None or not isinstance(loaded.call, ModelCall):
                return loaded
            entry = _Entry(loaded, _state(loaded.model))
        self._of_thread.taken = number = next(self._numbers)
        self.lent[number] = key, entry
        return replace(entry.loaded, tokenizer=copy.deepcopy(entry.loaded.tokenizer))

    def replace_weights(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights of a model, which is never lent again."""
        for _, entry in list(self.lent.values()):
            entry.is_spoiled |= entry.loaded.model is model
        replace_weights(model, tensors)

    def end_test(self, lent_before: set[int | None]) -> None:
        """Take back what was lent since."""
        for number in self.lent.keys() - lent_before:
            self._give_back(number)

    def keep_lent(self) -> None:
        """Leave all that is lent to its engines, which outlive the test that made them."""
        self.lent.clear()

    def _unchanged(self, key: Hashable) -> _Entry | None:
        while self._idle[key]:
            entry = self._idle[key].pop()
            if _state(entry.loaded.model) == entry.state:
                return entry
        return None

    def _give_back(self, number: int | None) -> None:
        key, entry = self.lent.pop(number, (None, None))
        if entry is not None and not entry.is_spoiled:
            self._idle[key].append(entry)


def _key(name: Any, settings: tuple[Any, ...]) -> Hashable:
    """Return all that a loaded model depends on."""
    path = resolve_model(name, None)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    native = library()
    return (
        *(str(name), str(path), *map(str, settings)),
        *((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files),
        None if native is None else current_isa(native),
        # Tests that leave less memory free load anew.
        vars(load_memory)["available_bytes"],
    )


POOL = ModelPool()


@pytest.fixture(scope="module", autouse=True)
def use_pool() -> Iterator[None]:
    """Let the engines of a module's tests share models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_file, "load_model", POOL.load)
        patch.setattr(engine_file, "set_up", POOL.set_up)
        patch.setattr(weights_file, "replace_weights", POOL.replace_weights)
        yield


@pytest.fixture(autouse=True)
def pooled_models(use_pool: None) -> Iterator[None]:
    """Take the models of a test's own engines back when it ends."""
    lent_before = set(POOL.lent)
    yield
    POOL.end_test(lent_before)
