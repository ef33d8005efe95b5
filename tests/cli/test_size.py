"""``ostinato size``, as a user sees it."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from ostinato.core.errors import ConfigError
from ostinato.lab.size.weights import adapter_bytes
from tests.cli.terminal import Terminal
from tests.lab.size.known_configs import LLAMA_2_7B

GEMMA_3 = {"model_type": "gemma3_text", "dtype": "bfloat16"}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "dtype": "bfloat16"}
HYBRID = {"model_type": "qwen3_5_text", "dtype": "bfloat16", "num_hidden_layers": 64}


def test_an_image_is_counted_in_tokens_and_bytes(tmp_path: Path, terminal: Terminal):
    """Gemma 3's images have 256 tokens, whatever their size."""
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
              "patch_size": 14, "image_size": 896}  # fmt: skip
    text = {**GEMMA_3, "hidden_size": 2560}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    path = written(tmp_path, config)

    said = terminal.run("size", str(path), "--image", "640x480").stdout

    said = " ".join(said.split())
    assert "An image of 640x480 pixels is 256 tokens of a prompt" in said
    assert "the encoder itself 800 MiB in bfloat16" in said


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with the config of Llama 2 7B and nothing else."""
    return written(tmp_path, LLAMA_2_7B).parent


def written(folder: Path, config: Any) -> Path:
    """A ``config.json`` with this content."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_llama_2_7b_takes_524_288_bytes_a_token(terminal: Terminal, checkpoint: Path):
    """A directory is enough; so is the file itself."""
    for model in (checkpoint, checkpoint / "config.json"):
        text = terminal.show("size", str(model))
        assert "multi-head" in text
        assert "32 x 128" in text
        assert "524,288 B" in text
        assert row(text, "1 token") == "512 KiB"
        assert row(text, "1 sequence of 1,000 tokens") == "500 MiB"
        assert row(text, "100 such sequences, sharing nothing") == "48.8 GiB"
        assert row(text, "Longest sequence in 24GiB") == "49,152 tokens"
        assert row(text, "Such sequences in 24GiB") == "49"


def test_the_model_inside_the_package_is_found_by_name(terminal: Terminal):
    """Four layers of two KV heads of 64, in bfloat16."""
    text = terminal.show("size", "tiny-shakespeare", "--tokens", "2048", "--memory", "1 MiB")

    assert row(text, "1 token") == "2 KiB"
    assert row(text, "1 sequence of 2,048 tokens") == "4 MiB"
    assert row(text, "Such sequences in 1 MiB") == "0"
    assert row(text, "Longest sequence in 1 MiB") == "512 tokens"


def test_windows_get_their_own_column(terminal: Terminal, tmp_path: Path):
    """What all tokens take, and what is left where sliding layers free theirs."""
    text = terminal.show("size", str(written(tmp_path, GEMMA_3)), "--tokens", "8192")

    assert "Window" in text
    assert row(text, "1 sequence of 8,192 tokens").split("  ")[0] == "832 MiB"
    assert row(text, "1 sequence of 8,192 tokens").endswith("480 MiB")
    assert "engines that free tokens outside the window" in text


def test_latents_are_shown_beside_the_heads_that_they_expand_to(terminal: Terminal, tmp_path: Path):
    text = terminal.show("size", str(written(tmp_path, DEEPSEEK_V3)))

    assert "70,272 B" in text
    assert row(text, "1 token").split() == ["68.6", "KiB", "4.77", "MiB"]


def test_states_are_counted_once_per_sequence(terminal: Terminal, tmp_path: Path):
    """48 of 64 layers keep a state; it does not grow, and makes reuse harder."""
    text = terminal.show("size", str(written(tmp_path, HYBRID)))

    assert "65,536 B" in text
    assert "linear attention" in text
    assert row(text, "1,000 tokens") == "62.5 MiB"
    assert row(text, "1 sequence of 1,000 tokens and its state") == "162 MiB"
    assert "reused only at positions where it was" in text


def test_the_dtype_can_be_chosen(terminal: Terminal, checkpoint: Path):
    assert "262,144 B" in terminal.show("size", str(checkpoint), "--dtype", "fp8")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("config", [LLAMA_2_7B, GEMMA_3, DEEPSEEK_V3, HYBRID])
def test_tables_fit_the_screen(terminal: Terminal, tmp_path: Path, config, columns):
    """No cell wraps: every row of figures keeps to one line."""
    terminal.columns = columns
    text = terminal.show("size", str(written(tmp_path, config)), "--requests", "100000")

    tables = [line for line in text.splitlines() if line.startswith(" ")]
    assert max(len(line) for line in tables) <= columns
    assert row(text, "100,000 such sequences, sharing nothing")


def test_json_gives_exact_bytes(terminal: Terminal, tmp_path: Path):
    """For scripts: no units, and null for what there is not."""
    model = str(written(tmp_path, GEMMA_3))
    figures = json.loads(terminal.show("size", model, "--tokens", "8192", "--json"))

    assert figures["model"] == model
    assert figures["token_bytes"] == 106_496
    assert figures["memory_bytes"] == 24 * 2**30
    assert [layer["num_layers"] for layer in figures["layers"]] == [22, 4]
    assert figures["footprints"]["whole"]["sequence_bytes"] == 8192 * 106_496
    assert figures["footprints"]["windowed"]["sequence_bytes"] == 4096 * (22 + 2 * 4) * 4096
    assert figures["footprints"]["expanded"] is None


class TestRefusals:
    """One line, exit code 2, no traceback."""

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (["{folder}/nothing"], "no such file"),
            (["{folder}"], "without config.json"),
            (["not a name"], "not a valid name"),
            (["tiny-shakespeare", "--dtype", "float12"], "dtype='float12'"),
            (["tiny-shakespeare", "--memory", "24G"], "memory='24G'"),
            (["tiny-shakespeare", "--tokens", "0"], "tokens=0"),
            (["tiny-shakespeare", "--requests", "0"], "requests=0"),
        ],
    )
    def test_a_model_or_an_option_that_is_none(
        self, terminal: Terminal, tmp_path: Path, options: list[str], named: str
    ):
        words = [option.replace("{folder}", str(tmp_path)) for option in options]
        assert named in terminal.refuse("size", *words)

    @pytest.mark.parametrize("text", ['{"model_type": "llama"', "[1, 2]", "\udcff"])
    def test_a_file_that_holds_no_config(self, terminal: Terminal, tmp_path: Path, text: str):
        """Truncated, of another kind, or no text at all."""
        path = tmp_path / "config.json"
        path.write_bytes(text.encode(errors="surrogateescape"))

        assert "config.json" in terminal.refuse("size", str(path))

    def test_a_model_that_we_cannot_size(self, terminal: Terminal, tmp_path: Path):
        model = str(written(tmp_path, {"model_type": "bert", "num_hidden_layers": 12}))

        assert "num_attention_heads" in terminal.refuse("size", model)


class TestHub:
    """Names that are nothing here are asked for on the hub."""

    def test_only_the_config_is_fetched(
        self, terminal: Terminal, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ):
        asked = []

        def fetch(repository: str, name: str) -> str:
            asked.append((repository, name))
            return str(checkpoint / name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)

        assert "524,288 B" in terminal.run("size", "meta-llama/Llama-2-7b-hf").stdout
        assert asked == [("meta-llama/Llama-2-7b-hf", "config.json")]

    def test_without_a_network_the_line_says_so(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        """The hub's own offline switch, and an empty cache."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        line = terminal.refuse("size", "nobody/nothing")

        assert "'nobody/nothing'" in line
        assert "tiny-shakespeare" in line
        assert "the hub cannot be reached" in line

    @pytest.mark.parametrize(
        ("error", "named"),
        [
            (errors.EntryNotFoundError("no entry"), "has no config.json"),
            (ConnectionResetError("reset by peer"), "reset by peer"),
        ],
    )
    def test_what_the_hub_answers_is_told(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str
    ):
        def fetch(repository: str, name: str) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)

        assert named in terminal.refuse("size", "somebody/something")


def row(text: str, name: str) -> str:
    """What stands behind a name in the table."""
    [line] = [line for line in text.splitlines() if line.startswith(f" {name}  ")]
    return line.removeprefix(f" {name}").strip()


def test_adapters_take_a_part_of_the_memory(terminal: Terminal, checkpoint: Path):
    """Ten low-rank matrices of 4 x 4096 in bfloat16, whose rank counts as 32."""
    tensors = {str(number): np.zeros((4, 4096), np.float32) for number in range(10)}
    save_file(tensors, checkpoint / "adapter_model.safetensors")
    text = terminal.show("size", str(checkpoint), "--lora", str(checkpoint))
    assert "The adapters take 2.5 MiB of the memory" in text
    with pytest.raises(ConfigError, match="cannot be read"):
        adapter_bytes([str(checkpoint / "nowhere")])
