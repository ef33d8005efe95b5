"""Compile the native library into the package.

Hatchling calls this while it builds a wheel or an editable installation. Where there is no C++
compiler the package is built without the library: everything works, in plain torch. The library
holds kernels for several instruction sets and chooses among them when it is loaded.

On macOS it has never been run, so it is compiled only with ``OSTINATO_MACOS_LIBRARY=1``.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/ostinato/runner/native/libostinato_native.so"


MACOS_VARIABLE = "OSTINATO_MACOS_LIBRARY"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the library and adds it to the wheel."""

    def dependencies(self) -> list[str]:
        """Ask for CMake and Ninja where the machine has none."""
        return [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; says so and goes on where that fails."""
        if self.target_name != "wheel" or not has_library():
            return
        compiler = [sys.executable, str(Path(self.root, "native/compile.py"))]
        done = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"built without the native library: {done.stderr}")
            Path(self.root, LIBRARY).unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        # A plain C ABI knows no version of Python.
        build_data["tag"] = f"py3-none-{self._platform_tag()}"
        build_data["artifacts"].append(LIBRARY)

    def _platform_tag(self) -> str:
        if sys.platform == "darwin":
            return macos_tag()
        sys.path.append(str(Path(self.root, "native")))
        from manylinux import platform_tag

        return platform_tag(Path(self.root, LIBRARY))


def has_library() -> bool:
    """Return whether a wheel for this system has the library in it."""
    is_chosen = sys.platform == "darwin" and os.environ.get(MACOS_VARIABLE) == "1"
    return sys.platform == "linux" or is_chosen


def macos_tag() -> str:
    """Return the platform tag of what is compiled on this Mac.

    CMake and clang compile for the system of ``MACOSX_DEPLOYMENT_TARGET``, else for this Mac's own;
    tags of macOS 11 and newer have 0 in place of a minor version.
    """
    target = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or platform.mac_ver()[0]
    return f"macosx_{target.partition('.')[0]}_0_{platform.machine()}"
