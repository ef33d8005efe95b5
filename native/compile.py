"""How is the native library compiled?

``python native/compile.py`` leaves it beside the Python that calls it; needs CMake, Ninja and a
C++ compiler. Prints what went wrong and exits with 1 where it cannot.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src/ostinato/runner/native/libostinato_native.so"


def compile_library() -> str | None:
    """Compile into the source tree; returns what went wrong, or None."""
    with tempfile.TemporaryDirectory() as build:
        for command in (
            ["cmake", "-S", str(ROOT / "native"), "-B", build, "-G", "Ninja"],
            ["cmake", "--build", build, "--target", "ostinato_native"],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                return f"{command[0]} does not start: {error}"
            if done.returncode:
                return (done.stdout + done.stderr)[-2000:]
        # Moved into place whole: a running program keeps the file that it has mapped.
        fresh = LIBRARY.with_suffix(".new")
        shutil.copyfile(Path(build) / LIBRARY.name, fresh)
        fresh.replace(LIBRARY)
    return None


if __name__ == "__main__":
    sys.exit(compile_library())
