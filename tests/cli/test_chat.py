"""``ostinato chat``, as a user sees it, and what the engine does meanwhile."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato import AsyncLLM, SamplingParams
from ostinato.cli.chat import ChatSession
from ostinato.core.plan import StepPlan, StepResult
from ostinato.runner.model_runner import ModelRunner
from tests.cli.engine_watch import EngineWatch, press_ctrl_c_in_step
from tests.cli.pseudo_terminal import CTRL_C, CTRL_D, RETURN, UP, PseudoTerminal
from tests.cli.terminal import Terminal, unwrapped

FEW = ("--max-tokens", "12", "--num-blocks", "128", "--seed", "5")
COST = re.compile(r"(\d+) prompt tokens, (\d+) cached \| (\d+) generated")


def costs(stderr: str) -> list[tuple[int, ...]]:
    """Of each turn: prompt tokens, cached tokens, generated tokens."""
    return [tuple(map(int, cost)) for cost in COST.findall(stderr)]


def play(*speeches: str) -> str:
    """The prompt that the embedded model's template makes of speeches in turn."""
    names = ("ROMEO:\n", "JULIET:\n") * len(speeches)
    said = zip(names, [*speeches, ""], strict=False)
    return "\n\n".join(f"{name}{speech}" for name, speech in said)


def test_the_second_turn_finds_all_of_the_first_one_in_the_cache(
    terminal: Terminal, watch: EngineWatch
):
    """Lines from a pipe; answers to stdout, costs to stderr. The last letter has no KV yet."""
    result = terminal.run("chat", *FEW, stdin="What news?\nSay on\n")
    first_answer, second_answer = result.stdout.splitlines()
    first, second = costs(result.stderr)
    prompts = play("What news?"), play("What news?", first_answer, "Say on")

    assert result.exit_code == 0
    assert first == (len(prompts[0]), 0, 12)
    assert second == (len(prompts[1]), len(prompts[0]) + len(first_answer) - 1, 12)
    assert len(second_answer) == 12
    assert watch.embedded_tokens == [len(prompts[1]) + 11]  # each letter once, but the last one


def test_a_system_prompt_stands_before_the_conversation(terminal: Terminal):
    result = terminal.run("chat", *FEW, "--system", "A street in Verona.", stdin="What news?\n")

    assert costs(result.stderr) == [(len("A street in Verona.\n\n" + play("What news?")), 0, 12)]


def test_commands_are_answered_and_are_no_part_of_the_conversation(terminal: Terminal):
    """After /reset the first line is asked again, and its prompt is found: all but one token."""
    lines = "/help\n\n/sing\nWhat news?\n/stats\n/reset\nWhat news?\n/quit\nSay on\n"
    result = terminal.run("chat", *FEW, stdin=lines)
    prompt = len(play("What news?"))

    assert result.exit_code == 0
    assert costs(result.stderr) == [(prompt, 0, 12), (prompt, prompt - 1, 12)]
    for command in ("/help", "/reset", "/stats", "/quit"):
        assert re.search(rf"^{command} +\w", result.stderr, re.MULTILINE)
    assert "there is no /sing" in result.stderr
    assert f"1 turn: 0 of {prompt} prompt tokens were cached (0.0%)" in result.stderr


def test_a_conversation_that_outgrows_the_context_gives_our_error_and_goes_on(terminal: Terminal):
    """The long line is refused with the numbers; the next one follows the first."""
    lines = f"What news?\n{'Alas, ' * 20}\nSay on\n"
    result = terminal.run("chat", *FEW, "--max-model-len", "100", stdin=lines)
    first_answer, _ = result.stdout.splitlines()
    refused = len(play("What news?", first_answer, "Alas, " * 20))
    third = len(play("What news?", first_answer, "Say on"))

    assert result.exit_code == 0
    assert f"error: the prompt has {refused} tokens, and max_model_len=100" in result.stderr
    assert "/reset starts a new one" in result.stderr
    assert [prompt for prompt, _, _ in costs(result.stderr)] == [len(play("What news?")), third]


def test_ctrl_c_ends_a_piped_conversation_as_it_ends_any_program(
    terminal: Terminal, watch: EngineWatch, monkeypatch: pytest.MonkeyPatch
):
    """Exit code 130, the line that was not asked yet is not asked, and no block is held."""
    press_ctrl_c_in_step(3, monkeypatch)
    result = terminal.run("chat", "--seed", "5", stdin="What news?\nSay on\n")

    assert result.exit_code == 130
    assert [generated for _, _, generated in costs(result.stderr)] == [3]
    assert result.stderr.splitlines()[-1] == "error: interrupted"


class TestConversation:
    """Ctrl-C in the middle of an answer, seen from inside."""

    @pytest.fixture
    def llm(self, watch: EngineWatch) -> Iterator[AsyncLLM]:
        llm = AsyncLLM(num_blocks=128, max_num_batched_tokens=64, max_num_seqs=4)
        yield llm
        llm.shutdown()

    def test_half_an_answer_stays_and_is_found_by_the_next_turn(
        self,
        llm: AsyncLLM,
        watch: EngineWatch,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ):
        """Five letters of it; four of them have KV."""
        conversation = ChatSession(llm, SamplingParams(max_tokens=40, seed=5))
        press_ctrl_c_in_step(5, monkeypatch)

        assert not conversation.answer("What news?")
        watch.check_nothing_is_held()
        half = conversation.messages[-1]["content"]
        assert conversation.answer("Say on")

        first, second = costs(capsys.readouterr().err)
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        assert len(half) == 5
        assert first == (len(play("What news?")), 0, 5)
        assert second[:2] == (len(play("What news?", half, "Say on")), first[0] + 4)

    def test_a_line_without_any_answer_does_not_stay(
        self,
        llm: AsyncLLM,
        watch: EngineWatch,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ):
        """The prompt takes three steps; Ctrl-C comes in the second of them.

        Until prices are known, so many pairs of a query and a key count as a token: 3 fewer fit.
        """
        conversation = ChatSession(llm, SamplingParams(max_tokens=40), system="Attend. " * 20)
        press_ctrl_c_in_step(2, monkeypatch)

        assert not conversation.answer("What news?")
        assert watch.embedded_tokens == [64 + 61]
        assert [message["role"] for message in conversation.messages] == ["system"]
        assert "that line was removed from the conversation" in capsys.readouterr().err

    def test_a_failing_forward_pass_is_told_and_the_conversation_goes_on(
        self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        conversation = ChatSession(llm, SamplingParams(max_tokens=5, seed=5))
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "execute", out_of_memory)
            assert conversation.answer("What news?")
        assert conversation.messages == []
        assert conversation.answer("Say on")

        told = capsys.readouterr().err
        assert "error: the forward pass failed: MemoryError: no room" in told
        assert costs(told) == [(len(play("Say on")), 0, 5)]


def out_of_memory(runner: ModelRunner, plan: StepPlan) -> StepResult:
    """Stand in for a step."""
    raise MemoryError("no room")


def test_a_chat_template_can_be_given_as_a_file(terminal: Terminal, tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}! {% endfor %}")
    result = terminal.run("chat", "--chat-template", str(template), *FEW, stdin="What news?\n")
    assert costs(result.stderr) == [(len("What news?! "), 0, 12)]
    line = terminal.refuse("chat", "--chat-template", "nothing.jinja")
    assert "chat_template='nothing.jinja'" in line


def test_an_option_out_of_range_is_refused_in_one_line(terminal: Terminal):
    assert "top_p=0" in terminal.refuse("chat", "--top-p", "0")


def test_input_that_is_no_text_is_refused(terminal: Terminal):
    assert "not UTF-8" in terminal.refuse("chat", stdin=b"What \xff news?\n")


def test_a_conversation_at_a_terminal():
    """Ctrl-C ends an answer, then a line; Up brings back the last one; Ctrl-D ends it all.

    The stop string never comes, so the answer is long enough for a hand to be in time.
    """
    endless = ("--stop", "@@", "--max-tokens", "1800", "--seed", "5")
    with PseudoTerminal("chat", *endless) as terminal:
        assert "This is tiny-shakespeare" in terminal.read_to("you: ")
        terminal.type(f"What news?{RETURN}")
        terminal.read_to(r"What news\?\n\S")
        terminal.type(CTRL_C)
        stopped = terminal.read_to(r"\|\s+stopped[\s\S]*you: ")
        [(prompt, cached, generated)] = costs(unwrapped(stopped))
        assert (prompt, cached) == (len(play("What news?")), 0)
        assert 1 <= generated < 1800

        terminal.type("nonsense")
        terminal.read_to("nonsense")
        assert "Ctrl-D or /quit quits" in terminal.press(CTRL_C, "you: ")
        terminal.type(UP)
        terminal.read_to(r"What news\?")
        terminal.type(RETURN)
        terminal.read_to(r"\n\S")
        terminal.type(CTRL_C)
        [(_, cached, _)] = costs(unwrapped(terminal.read_to(r"\|\s+stopped[\s\S]*you: ")))
        assert cached == prompt + generated - 1

        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
