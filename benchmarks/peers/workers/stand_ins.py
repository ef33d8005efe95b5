"""Stands in for the GPU engine around SGLang's cache, where it cannot be imported.

Its modules import the whole engine at their heads, though the tree uses none of it. So what is
missing on this machine, and the rooms of SGLang that compute, are replaced by modules that give
out an empty class or function for any name. The tree itself, its keys and its Rust core are real.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPUTING = tuple(
    f"sglang.srt.{room}"
    for room in (
        "configs", "disaggregation", "entrypoints", "function_call", "layers", "managers",
        "model_executor", "model_loader", "multimodal", "parser", "sampling", "speculative",
        "utils.hf_transformers",
    )
)  # fmt: skip


class _AnyName(type):
    """Classes that have every attribute: another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Nothing(metaclass=_AnyName):
    """Called, it gives back what it was called on, so that it can decorate."""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take anything."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _StandIn(ModuleType):
    """A module in which every name is."""

    __path__: list[str] = []  # noqa: RUF012 - as packages have it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (_Nothing,), {})
        setattr(self, name, made)
        return made


class StandIns(MetaPathFinder, Loader):
    """Finds what would be missing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Take rooms that compute, and what only SGLang asks for."""
        if name.startswith(COMPUTING) or (self._from_sglang() and self._is_missing(name)):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

    def _is_missing(self, name: str) -> bool:
        top = name.partition(".")[0]
        if top == "sglang" or top in sys.stdlib_module_names:
            return False
        if top in sys.modules:
            return isinstance(sys.modules[top], _StandIn)
        sys.meta_path.remove(self)
        try:
            return importlib.util.find_spec(top) is None
        except (ImportError, ValueError):
            return True
        finally:
            sys.meta_path.insert(0, self)

    def _from_sglang(self) -> bool:
        """Whether the import statement stands in SGLang."""
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__", "").startswith("sglang")
