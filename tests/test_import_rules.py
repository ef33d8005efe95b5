"""What loads what, seen from a fresh interpreter."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TENSOR_LIBRARIES = ("torch", "transformers")


def loaded_after(statement: str) -> set[str]:
    """Top-level names in `sys.modules` after a statement in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ostinato",
        "import ostinato.core",
        "import ostinato.cache",
        "import ostinato.sched",
        "import ostinato.lab",
        "import ostinato.router",
        "import ostinato.core, ostinato.cache, ostinato.sched",
    ],
)
def test_the_heart_loads_no_tensor_library(statement: str):
    """Simulators, routers and readers use these rooms on machines without torch."""
    assert loaded_after(statement).isdisjoint(TENSOR_LIBRARIES)


def test_public_names_are_listed_before_they_are_loaded():
    """For a shell's completion; listing them loads nothing."""
    loaded = loaded_after(
        "import ostinato\n"
        "assert {'LLM', 'AsyncLLM', 'SamplingParams', '__version__'} <= set(dir(ostinato))\n"
        "assert set(ostinato.__all__) <= set(dir(ostinato))"
    )
    assert loaded.isdisjoint(TENSOR_LIBRARIES)


def test_every_module_of_the_heart_loads_no_tensor_library():
    """A room's __init__ may import little; its files are asked one by one as well."""
    rooms = [ROOT / "src/ostinato" / room for room in ("core", "cache", "sched", "lab", "router")]
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for room in rooms
        for path in sorted(room.rglob("*.py"))
    ]
    assert len(names) > 3
    assert loaded_after("import " + ", ".join(names)).isdisjoint(TENSOR_LIBRARIES)


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
