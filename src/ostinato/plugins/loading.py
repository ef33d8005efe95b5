"""Loads a class that a setting names as ``FILE:Class`` or ``module:Class``."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato.core.errors import ConfigError


def is_plugin(value: object) -> bool:
    """Whether a setting names a class rather than something built in."""
    return isinstance(value, str) and ":" in value


def load_plugin(setting: str, value: str) -> Any:
    """Import what a setting names.

    Args:
        setting: Its name, for errors.
        value: Such as ``labs/02_radix/radix.py:Index`` or ``package.module:Index``.

    Raises:
        ConfigError: There is no such file, module or name, or importing it raises.

    Effects: runs the file's code; its module is kept under a name of its own.
    """
    place, _, name = value.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(
            f"{setting}={value!r}: must be FILE.py:Class or module:Class, such as "
            "labs/02_radix/radix.py:Index"
        )
    module = _import_file(setting, value, place) if place.endswith(".py") else None
    if module is None:
        module = _import_module(setting, value, place)
    if not hasattr(module, name):
        known = [each for each, what in vars(module).items() if isinstance(what, type)]
        raise ConfigError(
            f"{setting}={value!r}: {place} defines no {name}; its classes: "
            f"{', '.join(known) or 'none'}"
        )
    return getattr(module, name)


def import_file(path: Path) -> ModuleType:
    """Run a file as a module of its own, anew; raises what the file raises."""
    name = f"ostinato_plugin_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_file(setting: str, value: str, place: str) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting}={value!r}: there is no file {place}")
    try:
        return import_file(path)
    except Exception as error:
        raise ConfigError(f"{setting}={value!r}: {place} raises {_where(error, path)}") from error


def _import_module(setting: str, value: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise ConfigError(
            f"{setting}={value!r}: module {place} cannot be imported: {type(error).__name__}: "
            f"{error}"
        ) from error


def _where(error: Exception, path: Path) -> str:
    """Return an error with its line in the file."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    at = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{at}: {error}"
