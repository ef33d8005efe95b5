"""Tables and lists on the pages hold what the code holds."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.engine.config import EngineConfig
from tests.docs.reading import ROOT
from tests.support.checkpoints import FAMILIES

SETTINGS = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs/models.md").read_text(encoding="utf-8")
ROOMS = sorted({path.parent for path in (ROOT / "src/ostinato").glob("*/[a-z]*.py")})
SETTING = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)


def test_the_settings_table_has_every_setting_with_its_default():
    """In the order of the code, so that a new one is seen to be missing."""
    defaults = EngineConfig()
    assert SETTING.findall(SETTINGS) == [
        (field.name, repr(getattr(defaults, field.name))) for field in fields(EngineConfig)
    ]


def test_settings_of_the_rooms_have_no_other_default_than_those_of_the_engine():
    """The README shows one default; who embeds a room should meet the same."""
    known = {field.name: field.default for field in fields(EngineConfig)}
    for config in (CacheConfig, SchedulerConfig):
        for field in fields(config):
            if field.name in known and field.default is not MISSING and known[field.name]:
                assert field.default == known[field.name], field.name


def test_the_models_page_names_the_families_that_are_tested_exactly():
    """No more and no fewer than the tests build."""
    [sentence] = re.findall(r"^Tested, .*$", MODELS, re.MULTILINE)
    assert re.findall(r"`(\w+)`", sentence.partition("model types:")[2]) == list(FAMILIES)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_has_a_page_that_names_all_of_its_files(room: Path):
    """Subfolders too; a file that begins with an underscore is its neighbours' affair."""
    page = (ROOT / "docs/rooms" / f"{room.name}.md").read_text(encoding="utf-8")
    names = [p.relative_to(room).with_suffix("").as_posix() for p in room.rglob("*.py")]
    named = set(re.findall(r"`([\w/]+)`", page))
    missing = [n for n in names if not n.rpartition("/")[2].startswith("_") and n not in named]
    assert not missing
