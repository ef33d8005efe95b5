"""Any GGUF file of a served model type can be loaded; what cannot be is refused with the reason."""

import shutil
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from ostinato import LLM, SamplingParams
from ostinato.errors import BrokenCheckpoint, ConfigError, ModelNotFound, UnsupportedModel
from ostinato.runner import model_loader
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.checkpoints.checkpoint import weight_files
from ostinato.runner.checkpoints.gguf_file import open_gguf
from ostinato.runner.forward.codes import IN_GROUPS, PLAIN
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loading import pretrained
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.library import Isa
from tests.runner.bench import has_same_weights, own_logits, random_prompt
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import TEMPLATE, save_gguf
from tests.support.models.model_families import EOS_ID, MAX_LENGTH, VOCAB_SIZE
from tests.support.models.references import generate

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    """Rows of 64, which blocks of 32 divide; heads as Qwen3 has them, which files do not say."""
    return checkpoints.path("qwen3", hidden_size=64, head_dim=128)


@pytest.fixture(scope="module")
def plain_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "plain.gguf", checkpoint)


def test_a_file_is_the_model_that_it_was_made_of(plain_file: Path, checkpoint: Path):
    loaded, original = load_model(plain_file), load_model(checkpoint, forward="plain")

    assert loaded.path == plain_file and loaded.dtype == torch.float32
    assert (loaded.max_model_len, loaded.vocab_size) == (MAX_LENGTH, VOCAB_SIZE)
    assert loaded.eos_token_ids == {EOS_ID}
    assert has_same_weights(load_model(plain_file, forward="plain"), original)


def test_a_large_file_is_computed_in_bfloat16_unless_another_dtype_is_set(
    plain_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """The limit is 1 GiB; here it is the file's own size."""
    size = plain_file.stat().st_size
    for limit, expected in ((size + 1, torch.float32), (size, torch.bfloat16)):
        monkeypatch.setattr(pretrained, "LARGE_GGUF_BYTES", limit)
        assert load_model(plain_file).dtype == expected

    assert load_model(plain_file, dtype="float32").dtype == torch.float32


def test_activations_of_a_large_file_are_rounded_to_8_bits_unless_they_are_to_stay_floats(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The output layer's stay as they are; on AMX, all do."""
    path = save_gguf(tmp_path / "small.gguf", checkpoint, "Q4_0")
    monkeypatch.setattr(model_loader, "LARGE_GGUF_BYTES", path.stat().st_size)
    for has_amx, name, expected in (
        (False, "auto", IN_GROUPS),
        (True, "auto", PLAIN),
        (False, "float", PLAIN),
        (True, "int8", IN_GROUPS),
    ):
        isa = Isa.AMX if has_amx else Isa.GENERIC
        monkeypatch.setattr(model_loader, "current_isa", lambda _, isa=isa: isa)
        loaded = load_model(path, "float32", activation_dtype=name)
        assert loaded.quantization is not None and loaded.fused is not None
        assert loaded.quantization.activations == expected
        assert ("activations int8" in loaded.weight_format) == (expected == IN_GROUPS)
        weights = [each.weight for each in loaded.fused.decoder.projections()]
        assert {cast(QuantizedWeight, weight).activations for weight in weights} == {expected}
        assert cast(QuantizedWeight, loaded.fused.decoder.head.weight).activations == PLAIN


def test_activations_of_8_bits_need_weights_of_codes(checkpoint: Path):
    with pytest.raises(ConfigError, match=r"activation_dtype=.int8.: .*set quantization"):
        load_model(checkpoint, activation_dtype="int8")


def test_tokenizer_and_chat_template_come_out_of_the_file(plain_file: Path):
    tokenizer = load_model(plain_file).require_tokenizer()
    text = "The same prefix, another suffix."

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_quantized_weights_generate_what_generate_does(
    kind: str, dtype: Any, checkpoint: Path, tmp_path: Path
):
    """Cold, then with hits."""
    path = save_gguf(tmp_path / "small.gguf", checkpoint, kind)
    prompt = random_prompt(1, 37)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    tokens = generate(model, prompt, num_new=8)
    llm = LLM(path, dtype=dtype, block_size=4, num_blocks=64, attention="torch")

    for cached in (0, 36):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == tokens[0, 37:].tolist()
        assert output.num_cached_tokens == cached


def test_a_directory_with_one_file_means_that_file(plain_file: Path):
    assert load_model(plain_file.parent).path == plain_file


def test_a_directory_with_several_files_leaves_the_choice_to_the_user(
    plain_file: Path, tmp_path: Path
):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(plain_file, tmp_path / name)

    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF files \(a.gguf, b.gguf\).*one of them"):
        load_model(tmp_path)


def test_the_fingerprint_is_that_of_the_file(plain_file: Path, tmp_path: Path):
    copied = Path(shutil.copy(plain_file, tmp_path / "elsewhere.gguf"))
    changed = tmp_path / "changed.gguf"
    content = bytearray(plain_file.read_bytes())
    content[-3] ^= 1
    changed.write_bytes(content)

    prints = [load_model(path).fingerprint for path in (plain_file, copied, changed)]

    assert prints[0] == prints[1] != prints[2]


def test_loading_prints_nothing(plain_file: Path, capfd: pytest.CaptureFixture[str]):
    load_model(plain_file)

    assert capfd.readouterr() == ("", "")


def test_reading_leaves_the_reader_of_others_as_it_was(plain_file: Path):
    own = gguf.GGUFReader, gguf.get_tensor_name_map

    load_model(plain_file)

    assert own == (gguf.GGUFReader, gguf.get_tensor_name_map)


def test_a_split_model_is_read_from_any_of_its_parts(checkpoint: Path, tmp_path: Path):
    """The head is in another part than the config."""
    first = save_gguf(tmp_path / "split.gguf", checkpoint, "Q4_0", tensors_per_part=11)
    whole = load_model(save_gguf(tmp_path / "whole.gguf", checkpoint, "Q4_0"))
    files = weight_files(first)

    assert len(files) > 1
    for source in (first, files[-1]):
        loaded = load_model(source)
        assert loaded.path == first and loaded.forward.name == whole.forward.name
        assert has_same_weights(loaded, whole)


def test_a_split_model_without_one_of_its_parts_is_refused(checkpoint: Path, tmp_path: Path):
    first = save_gguf(tmp_path / "split.gguf", checkpoint, tensors_per_part=11)
    weight_files(first)[1].unlink()

    for source in (first, sorted(tmp_path.glob("*.gguf"))[-1]):
        with pytest.raises(BrokenCheckpoint, match=r"1 of the \d parts .* missing: split-00002-of"):
            load_model(source)


def test_a_part_under_another_name_is_refused(checkpoint: Path, tmp_path: Path):
    first = save_gguf(tmp_path / "split.gguf", checkpoint, tensors_per_part=11)
    renamed = first.rename(tmp_path / "model.gguf")

    with pytest.raises(UnsupportedModel, match=r"one of \d parts .* MODEL-00001-of-0000\d.gguf"):
        load_model(renamed)


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_llama_with_scaled_rope_is_the_model_that_the_file_was_made_of(
    kind: str, checkpoints: Checkpoints, tmp_path: Path
):
    """Rows of queries and keys are in llama.cpp's order, and frequencies have factors."""
    path = checkpoints.path("llama", hidden_size=64, rope_parameters=LLAMA_3)
    loaded = load_model(save_gguf(tmp_path / "llama.gguf", path, kind, "llama"))
    original = load_model(path, "float32", forward="plain")

    ours, theirs = (m.model.model.rotary_emb.inv_freq for m in (loaded, original))
    assert torch.allclose(ours, theirs, rtol=1e-6)
    weights = loaded.model.state_dict()
    for name, weight in original.model.state_dict().items():
        step = 0.0 if kind == "F32" else float(weight.abs().max()) / 127
        assert (weights[name] - weight).abs().max() <= step, name
    prompt = random_prompt(1, 12)
    away = (own_logits(loaded, prompt) - own_logits(original, prompt)).abs().max()
    assert away < (1e-4 if kind == "F32" else 1.0)


@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
def test_a_tied_embedding_is_kept_in_the_blocks_of_the_file(
    kind: str, checkpoints: Checkpoints, tmp_path: Path
):
    path = checkpoints.path("qwen3", hidden_size=64, head_dim=128, tie_word_embeddings=True)
    file = save_gguf(tmp_path / "tied.gguf", path, kind)
    loaded, plain = load_model(file), load_model(file, forward="plain")

    embedding = loaded.model.get_input_embeddings()
    assert isinstance(embedding, BlockEmbedding) == (kind == "Q4_0")
    assert has_same_weights(loaded, plain)
    prompt = random_prompt(1, 12)
    assert torch.allclose(own_logits(loaded, prompt), own_logits(plain, prompt), atol=1e-4)


def test_a_model_type_that_transformers_does_not_read_is_refused(checkpoint: Path, tmp_path: Path):
    path = save_gguf(tmp_path / "other.gguf", checkpoint, architecture="clip")

    with pytest.raises(UnsupportedModel, match=r"not understood by transformers.*clip"):
        load_model(path)


@pytest.mark.parametrize("kept", [0.0001, 0.01, 0.9, "another format"])
def test_a_truncated_file_and_one_of_another_format_are_refused(
    kept: float | str, plain_file: Path, tmp_path: Path
):
    content, path = plain_file.read_bytes(), tmp_path / "torn.gguf"
    is_other, said = isinstance(kept, str), r"torn\.gguf .*not a complete GGUF file"
    path.write_bytes(b"\x89PNG and more" if is_other else content[: int(len(content) * kept)])

    with pytest.raises(BrokenCheckpoint, match="begin with 'GGUF'" if is_other else said):
        load_model(path)


def test_a_header_is_parsed_as_the_package_parses_it(plain_file: Path):
    """Every value of every field; and a file that ends within its words is refused."""
    reference = gguf.GGUFReader(str(plain_file))
    with open_gguf(plain_file):
        reader = gguf.GGUFReader(str(plain_file))

    assert type(reader) is not type(reference)
    assert list(reader.fields) == list(reference.fields)
    for name, field in reference.fields.items():
        own = reader.fields[name]
        assert own.types == field.types and own.contents() == field.contents(), name
        values = [own.parts[place].tolist() for place in own.data]
        assert values == [field.parts[place].tolist() for place in field.data], name
    assert [t.data_offset for t in reader.tensors] == [t.data_offset for t in reference.tensors]
    words = reference.fields["tokenizer.ggml.tokens"]
    short = plain_file.with_name("short.gguf")
    short.write_bytes(plain_file.read_bytes()[: words.offset + 500])
    with pytest.raises(BrokenCheckpoint, match="not a complete GGUF file"), open_gguf(short):
        pass
