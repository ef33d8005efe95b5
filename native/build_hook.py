"""Compile the native library into the package.

Hatchling calls this while it builds a wheel or an editable installation. Where there is no C++
compiler the package is built without the library: everything works, in plain torch. The library
holds kernels for several instruction sets and chooses among them when it is loaded.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/ostinato/runner/native/libostinato_native.so"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the library and adds it to the wheel."""

    def dependencies(self) -> list[str]:
        """Ask for CMake and Ninja where the machine has none."""
        return [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; says so and goes on where that fails."""
        if self.target_name != "wheel" or sys.platform != "linux":
            return
        compiler = [sys.executable, str(Path(self.root, "native/compile.py"))]
        done = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"built without the native library: {done.stderr}")
            Path(self.root, LIBRARY).unlink(missing_ok=True)
            return
        sys.path.append(str(Path(self.root, "native")))
        from manylinux import platform_tag

        build_data["pure_python"] = False
        # A plain C ABI knows no version of Python.
        build_data["tag"] = f"py3-none-{platform_tag(Path(self.root, LIBRARY))}"
        build_data["artifacts"].append(LIBRARY)
