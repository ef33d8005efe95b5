"""Loads the native library, and chooses its instruction set.

The whole library uses the processor's best instruction set, or the one that ``OSTINATO_ISA`` names.
The numbers here are those of the enums in ``native/include/ostinato_native.h``.
"""

import ctypes
import enum
import functools
import logging
import os
import platform
import sys
from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.runner.native.ctypes_api import declare

logger = logging.getLogger(__name__)

PATH = Path(__file__).with_name("libostinato_native.so")
"""Path of the library."""

COMPILER = Path(__file__).parents[4] / "native/compile.py"
"""The script that compiles it, in a copy of the repository."""

ISA_VARIABLE = "OSTINATO_ISA"
"""The environment variable that names the instruction set to use, such as ``avx2``."""

ON_ARM = platform.machine() in ("aarch64", "arm64")

ARM_LEVELS = 16

ABI_VERSION = 22
"""The version of the header that these files were written for."""


class Isa(enum.IntEnum):
    """Instruction sets, each one containing those before it of its architecture.

    The library numbers the levels of each architecture from 1; those of ARM stand behind 16 here.
    """

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4
    NEON = 17
    NEON_DOTPROD = 18
    NEON_I8MM = 19
    NEON_BF16 = 20

    @classmethod
    def of_level(cls, level: int) -> "Isa":
        """Return the instruction set that this machine's library calls ``level``."""
        return cls(level + ARM_LEVELS if level and ON_ARM else level)

    @property
    def level(self) -> int:
        """The library's number."""
        return self % ARM_LEVELS

    @property
    def multiplies_blocks(self) -> bool:
        """Whether its instructions for bytes take codes in blocks (``weights/tiles.h``)."""
        return self >= Isa.NEON_DOTPROD

    @property
    def contained(self) -> list["Isa"]:
        """Those that a processor with this one has, itself last."""
        first = self - self.level + 1
        return [Isa.GENERIC, *(isa for isa in Isa if first <= isa <= self)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, loaded once; None if there is none.

    Effects: logs once why there is none; uses the instruction set that ``OSTINATO_ISA`` names.

    Raises:
        ConfigError: ``OSTINATO_ISA`` names an instruction set that this machine does not support.
    """
    loaded = _load()
    if isinstance(loaded, str):
        logger.warning("%s; until then models run in plain torch, slower", loaded)
        return None
    if (isa := requested_isa(best_isa(loaded))) is not None:
        use_isa(loaded, isa)
    return loaded


def why_missing() -> str | None:
    """Return why there is no library and how to get it; None if there is one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def _load() -> ctypes.CDLL | str:
    """Load the library, or return why it cannot be loaded and what to do."""
    # torch's OpenMP runtime has to be loaded before the library.
    import torch  # noqa: F401

    if not PATH.exists():
        return (
            f"no native library (the package was built without a C++ compiler): {_way_to_get_it()}"
        )
    try:
        loaded = ctypes.CDLL(str(PATH))
        version = loaded.ost_abi_version()
        if version == ABI_VERSION:
            declare(loaded)
            return loaded
    except OSError as error:
        return f"the native library does not load ({error}): {_way_to_get_it()}"
    except AttributeError as error:  # a version that grew since it was compiled
        stale = f"older than the Python around it ({error})"
    else:
        stale = f"of version {version}, but {ABI_VERSION} is needed"
    return f"the native library is {stale}: {_way_to_get_it()}"


def _way_to_get_it() -> str:
    if COMPILER.exists():
        return "run `python native/compile.py`, which needs a C++ compiler, CMake and Ninja"
    if sys.platform == "darwin":
        return "install the package with OSTINATO_MACOS_LIBRARY=1, which has not been tried yet"
    return "install a C++ compiler, and then the package again"


def requested_isa(best: Isa) -> Isa | None:
    """Return the instruction set that ``OSTINATO_ISA`` names; None if it is not set.

    Args:
        best: The machine's best instruction set.

    Raises:
        ConfigError: It names none that this machine supports.
    """
    name = os.environ.get(ISA_VARIABLE, "")
    if not name:
        return None
    names = {isa.name.lower(): isa for isa in best.contained}
    if name.lower() not in names:
        raise ConfigError(
            f"{ISA_VARIABLE}={name}: this machine runs {', '.join(names)}; "
            f"set {ISA_VARIABLE} to one of them, or unset it for the best"
        )
    return names[name.lower()]


def best_isa(native: ctypes.CDLL) -> Isa:
    """Return the best instruction set that the processor has."""
    return Isa.of_level(native.ost_best_isa())


def current_isa(native: ctypes.CDLL) -> Isa:
    """Return the instruction set in use."""
    return Isa.of_level(native.ost_current_isa())


def attention_isa(native: ctypes.CDLL) -> Isa:
    """Return the instruction set that attention uses.

    It is the one in use, except that an Intel whose best is ``AVX512_BF16`` uses ``AVX512`` by
    default: its VDPBF16PS is slower than plain multiply-adds, unlike AMD's.
    """
    return Isa.of_level(native.ost_attention_isa())


def use_isa(native: ctypes.CDLL, isa: Isa) -> None:
    """Use an instruction set from now on, in the whole process.

    Raises:
        ValueError: The processor does not have it.
    """
    if isa not in best_isa(native).contained or native.ost_use_isa(isa.level) != isa.level:
        raise ValueError(f"{isa.name}: this processor has {best_isa(native).name} at best")
