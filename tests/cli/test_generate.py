"""``ostinato generate``, as a user sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, LoRARequest, RequestOutput, SamplingParams
from ostinato.runner.checkpoints.model_resolver import resolve_model
from tests.cli.engine_watch import EngineWatch, press_ctrl_c_in_step
from tests.cli.terminal import Terminal
from tests.support.models.adapters import save_adapter

PROMPT = "ROMEO:\nWhat light"
FEW = ("--max-tokens", "12", "--num-blocks", "64")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The same model in Python, to compare with."""
    with LLM(num_blocks=256) as llm:
        yield llm


def expected(llm: LLM, prompt: str = PROMPT, **params: Any) -> RequestOutput:
    """What the Python face gives; 12 tokens at temperature 0.8, as in ``FEW``."""
    settings = {"max_tokens": 12, "temperature": 0.8} | params
    return llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)[0]


def test_the_text_goes_to_stdout_and_what_it_cost_to_stderr(
    terminal: Terminal, watch: EngineWatch, llm: LLM
):
    """The prompt and its continuation, as Python gives it with the same seed."""
    result = terminal.run("generate", PROMPT, "--seed", "5", *FEW)

    assert result.exit_code == 0
    assert result.stdout == f"{PROMPT}{expected(llm, seed=5).outputs[0].text}\n"
    assert result.stderr.startswith(
        f"{len(PROMPT)} prompt tokens, 0 cached | 12 generated | first after "
    )
    assert watch.embedded_tokens == [len(PROMPT) + 12 - 1]


def test_an_adapter_continues_the_prompt(terminal: Terminal, llm: LLM, tmp_path: Path):
    """Loaded from its directory; one that is none, or is no adapter, is refused in one line."""
    folder = save_adapter(resolve_model("tiny-shakespeare"), tmp_path / "sql", 1)
    result = terminal.run("generate", PROMPT, "--lora", str(folder), "--seed", "5", *FEW)
    assert result.exit_code == 0, result.output
    assert result.stdout != f"{PROMPT}{expected(llm, seed=5).outputs[0].text}\n"
    with LLM(num_blocks=64, enable_lora=True) as adapted:
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
        request = LoRARequest("sql", 1, folder)
        [output] = adapted.generate(PROMPT, params, lora_request=request, use_tqdm=False)
    assert result.stdout == f"{PROMPT}{output.outputs[0].text}\n"
    refused = terminal.refuse("generate", PROMPT, "--lora", str(tmp_path), *FEW)
    assert "adapter_config.json cannot be read" in refused


def test_the_prompt_can_be_left_out(terminal: Terminal, llm: LLM):
    result = terminal.run("generate", PROMPT, "--no-echo", "--seed", "5", *FEW)

    assert result.stdout == f"{expected(llm, seed=5).outputs[0].text}\n"


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_pipe_gives_the_prompt_without_its_last_line_break(terminal: Terminal, arguments):
    """``echo`` adds one; line breaks before it are the user's."""
    result = terminal.run("generate", *arguments, "--json", *FEW, stdin="ROMEO:\n\nWhat\n")

    assert json.loads(result.stdout)["prompt"] == "ROMEO:\n\nWhat"


def test_the_name_of_a_model_is_no_prompt(terminal: Terminal, tmp_path: Path, monkeypatch):
    """``ostinato generate smollm2`` says it as ``chat`` and ``serve`` do."""
    monkeypatch.setenv("OSTINATO_MODELS", str(tmp_path))
    refused = terminal.refuse("generate", "smollm2", stdin="To be")
    assert "fetch it once with `ostinato models get smollm2`" in refused
    done = terminal.run("generate", "tiny-shakespeare", "--max-tokens", "1", stdin="To be")
    assert done.exit_code == 0 and done.stdout.startswith("To be")


def test_several_continuations_share_one_prompt(terminal: Terminal, watch: EngineWatch, llm: LLM):
    """Three texts below each other; the prompt goes through the model once."""
    result = terminal.run("generate", PROMPT, "-n", "3", "--seed", "5", *FEW)
    texts = [output.text for output in expected(llm, seed=5, n=3).outputs]
    headings = [line for line in result.stdout.splitlines() if line.endswith("───")]

    assert len(set(texts)) == 3
    assert [heading.rstrip("─ ") for heading in headings] == ["1 of 3", "2 of 3", "3 of 3"]
    for heading, text in zip(headings, texts, strict=True):
        assert f"{heading}\n{PROMPT}{text}\n" in result.stdout
    assert "36 generated" in result.stderr
    assert watch.embedded_tokens == [len(PROMPT) + 3 * 11]


def test_json_gives_the_whole_result(terminal: Terminal, llm: LLM):
    """And nothing else: a program reads it."""
    options = ("-n", "2", "--seed", "5", "--logprobs", "2", "--prompt-logprobs", "0", "--json")
    text = terminal.show("generate", PROMPT, *options, *FEW)
    result = json.loads(text)
    same = expected(llm, seed=5, n=2, logprobs=2, prompt_logprobs=0)

    assert result["model"] == "tiny-shakespeare"
    assert result["prompt"] == PROMPT
    assert result["prompt_token_ids"] == same.prompt_token_ids
    assert result["num_cached_tokens"] == result["num_copied_tokens"] == 0
    assert [output["token_ids"] for output in result["outputs"]] == [
        output.token_ids for output in same.outputs
    ]
    assert {output["finish_reason"] for output in result["outputs"]} == {"length"}
    assert 0 < result["seconds"]["first_token"] <= result["seconds"]["total"]
    assert result["prompt_logprobs"][0] is None
    assert [entry[0]["token"] for entry in result["prompt_logprobs"][1:]] == list(PROMPT[1:])


def test_json_log_probabilities_begin_with_the_token_itself(terminal: Terminal):
    """Then come the likeliest two, of which it may be one."""
    text = terminal.show("generate", PROMPT, "--logprobs", "2", "--json", *FEW)
    [output] = json.loads(text)["outputs"]
    first = [position[0] for position in output["logprobs"]]

    assert [entry["token_id"] for entry in first] == output["token_ids"]
    assert "".join(entry["token"] for entry in first) == output["text"]
    assert sum(entry["logprob"] for entry in first) == pytest.approx(output["cumulative_logprob"])
    assert {len(position) for position in output["logprobs"]} <= {2, 3}


@pytest.mark.parametrize(
    ("option", "value", "param", "meant"),
    [
        ("--top-k", "1", "top_k", 1),
        ("--top-p", "0.3", "top_p", 0.3),
        ("--min-p", "0.9", "min_p", 0.9),
        ("--presence-penalty", "1.5", "presence_penalty", 1.5),
        ("--frequency-penalty", "1.5", "frequency_penalty", 1.5),
        ("--repetition-penalty", "3", "repetition_penalty", 3.0),
    ],
)
def test_every_option_of_sampling_reaches_the_sampler(
    terminal: Terminal, llm: LLM, option: str, value: str, param: str, meant: float
):
    """Each changes the text that the seed alone gives, and gives the same as in Python."""
    plain = expected(llm, seed=5, max_tokens=40).outputs[0].text
    result = terminal.run(
        *("generate", PROMPT, "--no-echo", "--seed", "5", option, value),
        *("--max-tokens", "40", "--num-blocks", "64"),
    )

    assert (
        result.stdout
        == f"{expected(llm, seed=5, max_tokens=40, **{param: meant}).outputs[0].text}\n"
    )
    assert result.stdout != f"{plain}\n"


def test_what_is_not_given_is_the_models_own_or_an_override_of_it(terminal: Terminal, llm: LLM):
    """The embedded model says 0.8, and an option still wins."""
    command = ("generate", PROMPT, "--no-echo", "--seed", "5", "--num-blocks", "64")
    changed = ("--override-generation-config", '{"temperature": 0.3, "max_new_tokens": 20}')

    own = terminal.run(*command, "--max-tokens", "40").stdout
    over = terminal.run(*command, *changed).stdout
    given = terminal.run(*command, *changed, "-t", "0.8", "--max-tokens", "20").stdout

    assert own == f"{expected(llm, seed=5, max_tokens=40).outputs[0].text}\n"
    assert over == f"{expected(llm, seed=5, max_tokens=20, temperature=0.3).outputs[0].text}\n"
    assert given == f"{expected(llm, seed=5, max_tokens=20).outputs[0].text}\n"


def test_every_setting_of_the_engine_reaches_it(terminal: Terminal, watch: EngineWatch):
    """Memory has a unit; 64 KiB hold 2 blocks of 8 tokens in float32."""
    result = terminal.run(
        *("generate", "To be", "--max-tokens", "2", "--dtype", "float32", "--index", "hash"),
        *(
            "--block-size", "8", "--kv-cache-memory", "64KiB", "--max-model-len", "10",
            "--no-enable-prefix-caching",
        ),
    )  # fmt: skip
    [engine] = watch.engines

    assert result.exit_code == 0
    assert engine.config.dtype == "float32"
    assert engine.cache.config.index == "hash"
    assert engine.cache.config.block_size == 8
    assert engine.cache.config.num_blocks == 2
    assert not engine.cache.config.enable_prefix_caching
    assert engine.scheduler.config.max_model_len == 10


def test_ctrl_c_keeps_the_text_so_far_and_gives_the_blocks_back(
    terminal: Terminal, watch: EngineWatch, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Pressed in the tenth step: ten letters, of those that the seed would have gone on with."""
    press_ctrl_c_in_step(10, monkeypatch)
    options = ("--seed", "5", "--max-tokens", "1500", "--no-echo")
    result = terminal.run("generate", PROMPT, *options)
    text = expected(llm, seed=5, max_tokens=10).outputs[0].text

    assert result.exit_code == 130
    assert result.stdout == f"{text}\n"
    assert "10 generated" in result.stderr
    assert result.stderr.splitlines()[-1] == "error: interrupted"
    watch.check_nothing_is_held()


COMMANDS = ("demo", "generate", "chat", "serve", "explain", "lint", "size", "savings")


@pytest.mark.parametrize(
    "command", [*COMMANDS, "simulate", "plan", "cache lease", "cache record start", "keys new"]
)
def test_help_fits_the_screen(terminal: Terminal, command: str):
    """80 columns, nothing cut."""
    text = terminal.show(*command.split(), "--help")

    assert f"Usage: ostinato {command}" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


class TestRefusals:
    """One line, exit code 2, nothing on stdout."""

    @pytest.mark.parametrize("stdin", ["", "\n"])
    def test_an_empty_prompt(self, terminal: Terminal, stdin: str):
        assert "the prompt is empty" in terminal.refuse("generate", stdin=stdin)
        assert "the prompt is empty" in terminal.refuse("generate", "")

    def test_a_prompt_that_is_no_text(self, terminal: Terminal):
        """Bytes that are not UTF-8, from a pipe or as an argument."""
        assert "not UTF-8" in terminal.refuse("generate", "-", stdin=b"To be \xff")
        assert "not UTF-8" in terminal.refuse("generate", "To be \udcff")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--max-tokens", "0"),
            ("--temperature", "-1"),
            ("--temperature", "nan"),
            ("--top-p", "0"),
            ("--top-k", "-2"),
            ("--min-p", "2"),
            ("--presence-penalty", "3"),
            ("--frequency-penalty", "-3"),
            ("--repetition-penalty", "0"),
            ("--seed", str(2**64)),
            ("-n", "0"),
            ("--stop", ""),
            ("--kv-cache-memory", "3G"),
            ("--index", "tree"),
        ],
    )
    def test_an_option_out_of_range(self, terminal: Terminal, option: str, value: str):
        line = terminal.refuse("generate", "To be", option, value)

        assert option.strip("-").replace("-", "_") in line
        assert value in line

    @pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
    def test_log_probabilities_that_would_not_be_shown(self, terminal: Terminal, option: str):
        assert "add --json" in terminal.refuse("generate", "To be", option, "1")
