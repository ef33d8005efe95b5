"""Modules of the build, which is no package: tests load them from their files."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def build_module(name: str) -> ModuleType:
    """Load a module of the folder ``native``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"native/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
