"""What loads what, seen from a fresh interpreter."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TENSOR_LIBRARIES = ("torch", "transformers")


def loaded_after(statement: str) -> set[str]:
    """Names in `sys.modules` after a statement in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_public_classes_load_nothing_that_only_a_model_needs():
    """What loads models in transformers takes as long as torch; a script may end before that."""
    statement = "from ostinato import LLM, AsyncLLM, SamplingParams"
    assert loaded_after(statement).isdisjoint(
        {
            "transformers.modeling_utils", "transformers.models", "torch._dynamo",
            "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
            "accelerate", "sympy", "matplotlib", "scipy", "ray",
        }
    )  # fmt: skip


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_first_start_says_in_a_terminal_that_python_compiles(tmp_path: Path, is_terminal: bool):
    """Twelve seconds in silence look like a hang; a log needs no such line."""
    (tmp_path / "torch.py").write_text("")
    program = (
        "import io, sys, ostinato\n"
        "class Terminal(io.StringIO):\n"
        f"    def isatty(self): return {is_terminal}\n"
        "stderr = Terminal()\n"
        "ostinato.announce_compilation(stderr)\n"
        "import torch\n"
        "ostinato.announce_compilation(stderr)\n"
        "print(len(stderr.getvalue().splitlines()))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": path}, text=True)
    assert int(printed) == is_terminal


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collection_pauses_while_imports_run(is_enabled: bool):
    """Afterwards it is as before, and no collection walks what was imported until all is walked."""
    program = f"""
import gc, ostinato
(gc.enable if {is_enabled} else gc.disable)()
try:
    with ostinato.paused_collections():
        assert not gc.isenabled()
        imported = [object()]
        raise ImportError
except ImportError:
    assert gc.isenabled() is {is_enabled} and gc.get_freeze_count() == 0
assert any(each is imported for each in gc.get_objects(generation=2))
gc.freeze()
with ostinato.paused_collections():
    pass
assert gc.get_freeze_count()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_module_of_the_heart_loads_a_tensor_library_nor_does_listing_public_names():
    """Simulators, routers and readers use these rooms on machines without torch.

    Public names are listed for a shell's completion.
    """
    heads = ("core", "cache", "sched", "lab", "protocol", "router/policy", "router/process")
    rooms = [ROOT / "src/ostinato" / name for name in heads]
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for room in rooms
        for path in sorted(room.rglob("*.py"))
    ]
    assert len(names) > 3
    loaded = loaded_after(
        "import ostinato\n"
        "assert {'LLM', 'AsyncLLM', 'SamplingParams', '__version__'} <= set(dir(ostinato))\n"
        "assert set(ostinato.__all__) <= set(dir(ostinato))\n"
        "import " + ", ".join(names)
    )
    assert loaded.isdisjoint(TENSOR_LIBRARIES)


def test_a_tensor_library_would_be_seen(tmp_path: Path):
    """The tests above would be worth nothing if torch went unseen; an empty one is enough."""
    (tmp_path / "torch.py").touch()
    assert "torch" in loaded_after(f"sys.path.insert(0, {str(tmp_path)!r})\nimport torch")


def test_every_room_has_its_place_in_the_layers():
    """A room that the import contract does not name would be free to import anything."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in settings["contracts"] if c["type"] == "layers")["layers"]
    named = {room.strip(" ()") for layer in layers for room in re.split("[|:]", layer)}
    rooms = {path.parent.name for path in (ROOT / "src/ostinato").glob("*/*.py")}
    assert rooms - {"models"} <= named  # models holds data, no code
