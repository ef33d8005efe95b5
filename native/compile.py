"""Compile the native library.

``python native/compile.py`` leaves it beside the Python that calls it; needs CMake, Ninja and a
C++ compiler. Prints what went wrong and exits with 1 where it cannot. Ninja keeps what it compiled
in ``build/``: a second call compiles what has changed since the first, and waits while that runs.
With ``CMAKE_TOOLCHAIN_FILE`` in the environment it is compiled for another processor.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src/ostinato/runner/native/libostinato_native.so"


def compile_library() -> str | None:
    """Compile into the source tree; returns what went wrong, or None."""
    build = build_folder()
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _compile_in(build)


def build_folder() -> Path:
    """Return where the present compiler's work is kept; a container may see the same tree."""
    compiler = os.environ.get("CXX") or "c++"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    except OSError:
        version = b""  # CMake looks for others, and says what is missing
    options = [os.environ.get(name, "") for name in ("CXXFLAGS", "CMAKE_TOOLCHAIN_FILE")]
    facts = [compiler, version.decode(), *options, str(ROOT)]
    return ROOT / "build" / f"native-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _compile_in(build: Path) -> str | None:
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(build), "-G", "Ninja"],
        ["cmake", "--build", str(build), "--target", "ostinato_native"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]} does not start: {error}"
        if done.returncode:
            return (done.stdout + done.stderr)[-2000:]
    # Moved into place whole: a running program keeps the file that it has mapped.
    fresh = LIBRARY.with_suffix(".new")
    shutil.copyfile(build / LIBRARY.name, fresh)
    fresh.replace(LIBRARY)
    return None


if __name__ == "__main__":
    sys.exit(compile_library())
