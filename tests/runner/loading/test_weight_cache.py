"""A second start maps packed weights, and gives the model that the first one packed."""

import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.runner import model_loader
from ostinato.runner.checkpoints import fingerprints
from ostinato.runner.forward import quantized
from ostinato.runner.forward.weight_refs import replace_weights
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading import load_memory
from ostinato.runner.model_loader import load_model
from ostinato.runner.weight_cache import facts, folder, recording, restoring
from ostinato.runner.weight_cache.entry import Entry, EntryWriter
from ostinato.runner.weight_cache.folder import INDEX, WEIGHTS, cache_folder, entries
from tests.runner.loading.test_mxfp4 import SIZES
from tests.runner.loading.test_streamed import logits_of, same, vectors_of
from tests.support.instruction_sets import needs_library
from tests.support.models.adapters import save_adapter
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import save_gguf
from tests.support.models.images import PROCESSORS, image_checkpoint
from tests.support.models.quantized import save_mxfp4
from tests.support.models.word_checkpoints import save_words
from tests.support.pairs import pairwise

pytestmark = needs_library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own that keeps small and new checkpoints too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(recording, "MIN_BYTES", 0)
    monkeypatch.setattr(fingerprints, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(folder, "SPARE_BYTES", 0)
    return cache_folder()


@pytest.fixture
def writer(cache: Path) -> EntryWriter:
    cache.mkdir(parents=True)
    return EntryWriter(2**20)


@pytest.fixture
def llama(checkpoints: Checkpoints) -> Path:
    return checkpoints.path("llama")


def second(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LoadedModel:
    """Load a model; fail where anything but packed weights is read."""
    with monkeypatch.context() as patch:
        for name in ("stream_model", "read_whole", "open_gguf"):
            patch.setattr(model_loader, name, None)
        return load_model(path, **settings)


def mapped_bytes(entry: Path) -> int:
    """Return the bytes of an entry's weights that this process has mapped, in whole pages."""
    pages = set[int]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, *_, path = line.split(maxsplit=5)
        if path == str(entry / WEIGHTS):
            start, end = (int(address, 16) for address in addresses.split("-"))
            first = int(offset, 16) // mmap.PAGESIZE
            pages.update(range(first, first + (end - start) // mmap.PAGESIZE))
    return len(pages) * mmap.PAGESIZE


Maker = Callable[[Checkpoints, Path], Path]
"""Returns a checkpoint, which may be made in a folder."""


def of(family: str) -> Maker:
    return lambda checkpoints, _: checkpoints.path(family)


def experts_in_words(folder: Path, family: str, method: str, **changes: Any) -> Path:
    own = {**changes, "moe_intermediate_size": 64}
    save_words(folder / "words", method, act_order=method == "gptq", family=family, changes=own)
    return folder / "words"


SECOND_STARTS: list[tuple[Maker, dict[str, Any]]] = [
    (of("llama"), {}),
    (of("qwen3"), {"quantization": "int8"}),
    (of("qwen2"), {"dtype": "float32", "quantization": "w4a8"}),
    (of("gemma2"), {"dtype": "float16"}),
    (of("qwen3_moe"), {}),
    (of("qwen3_moe"), {"quantization": "int4"}),
    (of("qwen3_next"), {}),
    (of("granitemoehybrid"), {"quantization": "int8"}),
    # Codes that are places in a table, and attention that has sinks.
    (lambda known, folder: save_mxfp4(known.path("gpt_oss", **SIZES), folder / "published"), {}),
    (lambda _, folder: experts_in_words(folder, "qwen3_moe", "gptq", num_experts=20), {}),
]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("make", "changes"), SECOND_STARTS)
def test_a_second_start_is_the_first_one(
    make: Maker,
    changes: dict[str, Any],
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Nothing is read or compared: weights and what the probe learned are the entry's.

    Each tensor begins at a page, and what is between two counts. With experts in 4 bits, 32 of 38
    tensors are smaller than a page: 96,704 bytes of tensors are 204,896 of the file.
    """
    path, settings = make(checkpoints, tmp_path), {"dtype": "bfloat16", **changes}
    first = load_model(path, **settings)

    restored = second(path, monkeypatch, **settings)

    same(restored, first)
    assert len(entries()) == 1
    assert first.mapped_bytes == restored.mapped_bytes
    assert 0 <= mapped_bytes(entries()[0].folder) - restored.mapped_bytes < mmap.PAGESIZE


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_so_is_that_of_a_gguf_file(
    architecture: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Tokenizer and config are the entry's too; a Llama has rows in another order."""
    sizes: dict[str, Any] = {"hidden_size": 64, "tie_word_embeddings": True}
    if architecture == "qwen3":
        sizes["head_dim"] = 128
    checkpoint = checkpoints.path(architecture, **sizes)
    path = save_gguf(tmp_path / "tiny.gguf", checkpoint, "Q4_0", architecture)
    first = load_model(path, "bfloat16")

    restored = second(path, monkeypatch, dtype="bfloat16")

    same(restored, first)
    text = "The same prefix, another suffix."
    one, other = restored.require_tokenizer(), first.require_tokenizer()
    assert one(text)["input_ids"] == other(text)["input_ids"]
    assert one.chat_template == other.chat_template
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", PROCESSORS)
def test_so_is_that_of_a_model_with_an_encoder_of_images(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    path = image_checkpoint(checkpoints, family)
    first = load_model(path, "bfloat16")

    restored = second(path, monkeypatch, dtype="bfloat16")

    same(restored, first)
    assert torch.equal(vectors_of(restored), vectors_of(first))
    assert second(path, monkeypatch, dtype="bfloat16", images=False).vision is None


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"quantization": "int8"}),
        ("qwen3", {"quantization": "w4a8"}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"quantization": "int4"}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"quantization": "w8a8"}),
        ("hunyuan_v1_moe", {}),
        ("aria_text", {"quantization": "int4"}),
    ],
)
def test_steps_of_a_second_start_need_no_modules(
    family: str,
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
):
    """What the fused forward computes is kept; importing modules takes half of a start."""
    path = checkpoints.path(family)
    first = load_model(path, "bfloat16", **settings)

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "build_skeleton", None)
        restored = second(path, monkeypatch, dtype="bfloat16", **settings)
        logits = logits_of(restored)

    assert torch.equal(logits, logits_of(first))
    assert restored.size == first.size and restored.vocab_size == first.vocab_size


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_what_is_not_kept_is_left_to_the_modules(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Embeddings that are scaled; and angles that are half as wide, with sinks."""
    path = checkpoints.path(family)
    first = load_model(path, "bfloat16")

    restored = second(path, monkeypatch, dtype="bfloat16")

    assert Entry.open(entries()[0].folder).index["decoder"] is None
    same(restored, first)


def test_a_second_start_has_what_stays_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "v_head_dim": 16}
    path = experts_in_words(tmp_path, "deepseek_v3", "awq", **sizes)
    first = load_model(path, "bfloat16")

    same(second(path, monkeypatch, dtype="bfloat16"), first)


def test_nothing_is_kept_of_a_model_that_is_read_as_a_whole(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """An entry without weights would be written, refused and removed in every start."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = checkpoints.path("llama", rope_parameters=dynamic)
    for _ in range(2):
        load_model(path, "bfloat16")

    assert entries() == [] and "packed again" not in caplog.text


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe"])
def test_a_model_that_is_built_later_shares_its_weights_with_the_steps(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Its entry may be gone by then, hooks see what is looked up, and new weights count."""
    path = checkpoints.path(family)
    first = load_model(path, "bfloat16")
    restored = second(path, monkeypatch, dtype="bfloat16")
    folder.clean()
    seen: list[int] = []

    embedding = restored.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _ids, rows: seen.append(rows.shape[1]))
    new = {name: tensor * 1.5 for name, tensor in first.model.state_dict().items()}
    for loaded in (first, restored):
        replace_weights(loaded.model, new)

    assert torch.equal(logits_of(restored), logits_of(first))
    assert seen == [13, 8]


def test_adapters_of_experts_answer_alike_after_a_second_start(
    checkpoints: Checkpoints, tmp_path: Path
):
    """Steps compute mixtures by the names that the model's modules have."""
    base = checkpoints.path("qwen3_moe")
    targets = ["gate_proj", "down_proj", "gate"]
    folder = save_adapter(base, tmp_path / "sql", 1, target_modules=targets)
    sql, answers = LoRARequest("sql", 1, folder), []
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1, detokenize=False)
    for _ in range(2):
        with LLM(str(base), dtype="bfloat16", num_blocks=8, block_size=16, enable_lora=True) as llm:
            both = llm.generate([[5, 6, 7]] * 2, params, lora_request=[sql, None], use_tqdm=False)
        answers.append([output.outputs[0].cumulative_logprob for output in both])
    assert len(entries()) == 1 and answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_other_settings_are_another_entry(llama: Path):
    load_model(llama, "bfloat16")
    load_model(llama, "bfloat16", quantization="int8")

    assert len(entries()) == 2


def test_another_layout_of_codes_is_another_entry(llama: Path, monkeypatch: pytest.MonkeyPatch):
    """As a processor packs them that has instructions for blocks; with the same logits."""
    pairs = load_model(llama, quantization="int8")
    for module in (quantized, facts):
        monkeypatch.setattr(module, "packs_blocks", lambda: True)
    load_model(llama, quantization="int8")

    blocks = second(llama, monkeypatch, quantization="int8")

    assert len(entries()) == 2
    assert blocks.fused is not None
    head = blocks.fused.decoder.head.weight
    assert isinstance(head, quantized.QuantizedWeight) and head.is_in_blocks
    same(blocks, pairs)


def test_weights_that_are_replaced_change_one_process_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """They are mapped privately: the next start has the numbers of the checkpoint."""
    first = load_model(llama, "bfloat16")
    before = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    restored = second(llama, monkeypatch, dtype="bfloat16")
    for loaded in (first, restored):
        replace_weights(loaded.model, {name: tensor + 1 for name, tensor in before.items()})

    again = second(llama, monkeypatch, dtype="bfloat16").model.state_dict()
    assert all(torch.equal(again[name], before[name]) for name in before)
    Entry.open(entries()[0].folder).verify()


def write_anew(file: Path, content: bytes) -> None:
    """Replace a file, which a model may have mapped."""
    file.unlink()
    file.write_bytes(content)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    write_anew(file, content)


DAMAGE = [flip, lambda file: write_anew(file, file.read_bytes()[:-1]), Path.unlink]


@pairwise("damage", DAMAGE, "name", [INDEX, WEIGHTS])
def test_a_damaged_entry_is_packed_again(
    name: str, damage: Callable[[Path], None], llama: Path, monkeypatch: pytest.MonkeyPatch
):
    first = load_model(llama, "bfloat16")
    damage(entries()[0].folder / name)

    same(load_model(llama, "bfloat16"), first)
    same(second(llama, monkeypatch, dtype="bfloat16"), first)


def test_an_entry_that_builds_no_model_is_packed_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """As one that lacks a weight, which no checksum shows."""
    first = load_model(llama, "bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(Entry, "tensor", lambda self, name: {}[name])
        same(load_model(llama, "bfloat16"), first)
    same(second(llama, monkeypatch, dtype="bfloat16"), first)


def test_a_copied_entry_is_compared_with_its_checksums(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its inode and times are others; once they are known, nothing is read."""
    first = load_model(llama, "bfloat16")
    own = entries()[0].folder
    shutil.copytree(own, own.with_name("copy"))
    shutil.rmtree(own)
    own.with_name("copy").rename(own)
    verified: list[Entry] = []
    verify = Entry.verify
    monkeypatch.setattr(Entry, "verify", lambda self: (verified.append(self), verify(self)))

    same(second(llama, monkeypatch, dtype="bfloat16"), first)
    assert len(verified) == 1


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("num_writes", [0, 1, 5, 100])
def test_a_full_disk_costs_a_line_in_the_log(
    num_writes: int, llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is left on it, and nothing of the model is mapped from what was deleted."""
    expected = load_model(llama, "bfloat16", weight_cache_bytes=0)
    add, written = EntryWriter.add, 0

    def limited(self: EntryWriter, name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal written
        written += 1
        if written > num_writes:
            raise OSError(28, "No space left on device")
        return add(self, name, tensor)

    monkeypatch.setattr(EntryWriter, "add", limited)
    loaded = load_model(llama, "bfloat16")

    same(loaded, expected)
    if written > num_writes:
        assert not list(cache_folder().iterdir()) and loaded.mapped_bytes == 0
        assert str(cache_folder()) not in Path("/proc/self/maps").read_text()


def test_without_a_folder_to_write_into_a_model_is_packed_each_time(llama: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file where a folder should be")

    same(load_model(llama, "bfloat16"), load_model(llama, "bfloat16"))


def test_a_folder_that_others_can_write_to_is_not_used(
    llama: Path, cache: Path, caplog: pytest.LogCaptureFixture
):
    first = load_model(llama, "bfloat16")
    cache.chmod(0o777)

    with caplog.at_level("INFO", "ostinato"):
        again = load_model(llama, "bfloat16")

    same(again, first)
    assert again.mapped_bytes == 0 and "others can write to" in caplog.text


def test_of_two_writers_one_publishes(writer: EntryWriter, cache: Path):
    """Both go on with what they wrote."""
    writers = writer, EntryWriter(2**20)
    numbers = [each.add("a", torch.arange(5)) for each in writers]
    for each in writers:
        each.publish("key")

    assert [kept.folder.name for kept in entries()] == ["key"]
    assert [path.name for path in cache.iterdir()] == ["key"]
    assert all(torch.equal(each, torch.arange(5)) for each in numbers)
    assert torch.equal(Entry.open(cache / "key").tensor("a"), torch.arange(5))


def test_what_a_killed_process_left_is_removed(llama: Path, writer: EntryWriter, cache: Path):
    """But not what another one is writing."""
    killed = cache / ".partial-killed"
    killed.mkdir()
    (killed / "weights.bin").write_bytes(b"half")

    load_model(llama, "bfloat16")

    assert writer.folder.exists() and not killed.exists()
    writer.discard()


def test_what_was_used_least_recently_is_evicted(llama: Path):
    sizes = []
    for quantization in (None, "int8", "int4"):
        load_model(llama, "bfloat16", quantization=quantization)
        sizes.append(entries()[-1].num_bytes)
    load_model(llama, "bfloat16")
    oldest, _, newest = (each.folder for each in entries())

    load_model(llama, "bfloat16", quantization="w8a8", weight_cache_bytes=sum(sizes))

    remaining = [each.folder for each in entries()]
    assert oldest not in remaining and newest in remaining


def test_0_keeps_and_uses_nothing(llama: Path, cache: Path):
    assert load_model(llama, "bfloat16", weight_cache_bytes=0).mapped_bytes == 0
    assert not cache.exists()


def test_mapped_weights_have_to_fit_with_the_keys_and_values(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    load_model(llama, "bfloat16")
    monkeypatch.setattr(restoring, "available_bytes", lambda: load_memory.STEP_BYTES)

    with pytest.raises(ConfigError, match=r"of weights, .* of keys and values.* are free"):
        second(llama, monkeypatch, dtype="bfloat16")


def test_a_tensor_of_any_dtype_and_shape_is_mapped_as_it_was(writer: EntryWriter, cache: Path):
    tensors = {
        "vector": torch.randn(7, dtype=torch.bfloat16),
        "cube": torch.randint(-5, 5, (3, 2, 5), dtype=torch.int8),
        "none": torch.empty(0, 4),
    }
    for name, tensor in tensors.items():
        assert torch.equal(writer.add(name, tensor), tensor)
    with pytest.raises(OSError, match="more than"):
        writer.add("large", torch.zeros(2**20))
    writer.publish("key")

    opened = Entry.open(cache / "key")
    assert all(torch.equal(opened.tensor(name), tensor) for name, tensor in tensors.items())
    assert "vector" in opened and "other" not in opened


def test_weights_are_mapped_on_a_system_with_pages_of_16_kib(
    writer: EntryWriter, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files align tensors to 4,096 bytes; macOS maps at multiples of 16,384 alone."""
    tensors = {name: torch.randn(1000 + n) for n, name in enumerate("abcdef")}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.publish("key")
    offsets, map_file = [], mmap.mmap

    def strict(fd: int, length: int, offset: int = 0, **options: Any) -> mmap.mmap:
        offsets.append(offset)
        assert offset % 16_384 == 0
        return map_file(fd, length, offset=offset, **options)

    monkeypatch.setattr(mmap, "ALLOCATIONGRANULARITY", 16_384)
    monkeypatch.setattr(mmap, "mmap", strict)
    opened = Entry.open(cache / "key")

    assert all(torch.equal(opened.tensor(name), tensor) for name, tensor in tensors.items())
    assert len(set(offsets)) > 1
