"""The number of blocks that fit into memory."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ostinato.core.errors import ConfigError
from ostinato.runner import memory
from ostinato.runner.memory import available_bytes, num_blocks_for

SIZES = {"bytes_per_block": 1000, "block_size": 16, "max_num_seqs": 4, "max_model_len": 100}


def test_a_given_number_of_blocks_is_taken_as_it_is():
    assert num_blocks_for(**SIZES, num_blocks=3) == 3


def test_given_bytes_are_filled_with_whole_blocks():
    assert num_blocks_for(**SIZES, kv_cache_memory=5999) == 5


def test_by_default_there_are_no_more_blocks_than_running_sequences_could_use():
    """Four sequences of 100 tokens need 7 blocks of 16 each."""
    assert num_blocks_for(**SIZES) == 28


def test_by_default_no_more_than_half_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 30_000)

    assert num_blocks_for(**SIZES) == 15


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"kv_cache_memory": 999}, "kv_cache_memory=999"),
        ({"kv_cache_memory": -1}, "kv_cache_memory=-1"),
    ],
)
def test_less_than_a_block_is_refused_with_the_bytes_of_one(settings: dict[str, int], said: str):
    with pytest.raises(ConfigError, match=r"one block needs 1,000 bytes") as refusal:
        num_blocks_for(**SIZES, **settings)

    assert said in str(refusal.value)


def test_a_machine_with_no_memory_left_is_refused_with_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1998)

    with pytest.raises(ConfigError, match=r"999 bytes \(50% of what is free\) holds no block"):
        num_blocks_for(**SIZES)


def test_saying_the_size_twice_is_refused():
    with pytest.raises(ConfigError, match=r"num_blocks=3 and kv_cache_memory=5000"):
        num_blocks_for(**SIZES, num_blocks=3, kv_cache_memory=5000)


def test_a_device_that_does_not_tell_asks_for_a_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)

    with pytest.raises(ConfigError, match=r"set num_blocks or kv_cache_memory"):
        num_blocks_for(**SIZES)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "5000\n", "memory.current": "2000\n"}, 3000),
        ({"memory.max": "5000\n", "memory.current": "6000\n"}, 0),
        (
            {
                "memory.max": "5000",
                "memory.current": "4900",
                "memory.stat": "anon 900\ninactive_file 3000\nactive_file 1000\nshmem 400\n",
            },
            4100,
        ),
        (
            {
                "memory.max": "max",
                "memory.current": "4900",
                "box/memory.max": "700",
                "box/memory.current": "300",
            },
            400,
        ),
        ({"memory/memory.limit_in_bytes": "70", "memory/memory.usage_in_bytes": "20"}, 50),
    ],
)
def test_a_containers_limit_counts(files, left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both versions of control groups, and files in memory that the kernel can drop."""
    (tmp_path / "of_process").write_text("0::/box\n")
    monkeypatch.setattr(memory, "PROCESS_GROUPS", tmp_path / "of_process")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    assert available_bytes() == left


def test_a_container_without_limit_leaves_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    found = available_bytes()

    assert found is not None and found > 2**20


def test_the_machines_free_memory_is_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on macOS, which has neither ``/proc/meminfo`` nor control groups."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "PROCESS_GROUPS", tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * 2**30))

    assert available_bytes() == 7 * 2**30


@pytest.mark.parametrize("error", [OSError, RuntimeError, psutil.AccessDenied])
def test_a_system_that_does_not_say_leaves_the_size_to_a_setting(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise error()

    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", fail)

    assert available_bytes() is None
