"""The heart installs with NumPy alone."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCKED = """
import importlib, pkgutil, sys

class OnlyNumPy:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"numpy", "ostinato", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, OnlyNumPy())
sys.path.insert(0, sys.argv[1])
import ostinato
assert ostinato.__file__.startswith(sys.argv[1]), ostinato.__file__
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build ostinato-core and unpack it."""
    folder = tmp_path_factory.mktemp("core")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT / "packaging/core", check=True, capture_output=True)
    [wheel] = folder.glob("ostinato_core-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def run(core: Path, program: str) -> str:
    command = [sys.executable, "-c", BLOCKED + program, str(core)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_asks_for_numpy_alone(core: Path):
    [metadata] = core.glob("*.dist-info/METADATA")
    required = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist")
    assert [name for name in required or [] if "extra ==" not in name] == ["numpy>=2.0"]


def test_every_module_of_it_loads_with_numpy_alone(core: Path):
    program = """
for module in pkgutil.walk_packages(ostinato.__path__, "ostinato."):
    importlib.import_module(module.name)
    print(module.name)
"""
    names = run(core, program).split()
    assert {"ostinato.core", "ostinato.cache", "ostinato.sched"} < set(names)


def test_a_cache_made_of_it_finds_a_prefix(core: Path):
    program = """
from array import array
from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey

cache = CacheManager(CacheConfig(num_blocks=8, block_size=4))
key = PrefixKey(Identity(), array("I", range(8)))
print(cache.match(key).num_tokens)
"""
    assert run(core, program) == "0\n"


def test_it_says_where_the_engine_is(core: Path):
    program = """
try:
    ostinato.LLM
except ImportError as error:
    print(error)
"""
    assert "pip install ostinato" in run(core, program)
