"""What the templates of ten families keep and lose of earlier turns."""

import json
from typing import Any

import pytest

from ostinato.engine.prompts.template_report import report_template
from ostinato.templates.report import TemplateReport
from tests.support.models.chat_templates import FAMILIES
from tests.support.models.checkpoints import make_tokenizer

MARKS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|User|>", "<|Assistant|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>",
    "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]",
)  # fmt: skip

LOSSES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "chatml": {},
    "qwen2": {},
    "llama3": {},
    "gemma": {},
    "qwen3": {
        "reasoning": [("user message", "reasoning")] * 2,
        "tool calls with reasoning": [("user message", "reasoning")],
        "turns with enable_thinking=false": [("user message", "opening")] * 2,
    },
    "deepseek_r1": {
        "turns": [("user message", "opening")] * 2,
        "system prompt": [("user message", "opening")] * 2,
        "system message in the middle": [("system message", "opening")],
        "reasoning": [("user message", "reasoning")] * 2,
    },
    "mistral": {"tool calls": [("user message", "text")] * 2},
    "gpt_oss": {
        "turns": [("user message", "end mark")] * 2,
        "system prompt": [("user message", "end mark")] * 2,
        "system message in the middle": [("system message", "end mark")],
        "tool calls": [("user message", "end mark")] * 2,
        "reasoning": [("user message", "reasoning")] * 2,
        "tool calls with reasoning": [
            ("user message", "reasoning"), ("user message", "end mark"),
        ],
    },
    "glm": {
        "reasoning": [("user message", "reasoning")] * 2,
        "tool calls with reasoning": [("user message", "reasoning")],
        "turns with enable_thinking=false": [("user message", "opening")] * 2,
    },
    "keeps_reasoning": {
        "turns with enable_thinking=false": [("user message", "opening")] * 2,
    },
}  # fmt: skip
"""Where a client that sends back all that it got loses tokens, and why."""


def report(template: str, takes_images: bool = False) -> TemplateReport:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    result = report_template(tokenizer, takes_images)
    assert result is not None
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_loses_what_its_template_drops(family: str):
    told = report(FAMILIES[family])
    lost = {
        case.name: [(loss.at, loss.cause) for loss in case.losses]
        for case in told.dialogues
        if case.losses
    }
    assert lost == LOSSES[family]
    assert told.is_append_only == (not lost)
    assert bool(told.summary()) == bool(lost), "one line when something is lost, none otherwise"
    causes = {cause for losses in lost.values() for at, cause in losses if at == "user message"}
    assert told.drops_at_user_message == bool(causes - {"end mark"})


def test_a_loss_names_the_turn_its_tokens_and_what_was_written():
    """The first question's call is computed with its reasoning, and rendered without it."""
    [loss] = report(FAMILIES["qwen3"]).case("tool calls with reasoning").losses
    assert (loss.at, loss.message) == ("user message", 6)
    assert loss.before.endswith("assistant\n")
    assert loss.written.startswith("<think>\nThe map lists")
    assert loss.rendered.lstrip().startswith("<tool_call>")
    assert loss.known_tokens > loss.lost_tokens > loss.known_tokens / 2


def test_an_end_mark_that_is_written_differently_costs_one_token():
    for loss in report(FAMILIES["gpt_oss"]).case("turns").losses:
        assert (loss.cause, loss.lost_tokens) == ("end mark", 1)


def test_a_client_that_drops_reasoning_in_a_loop_loses_each_step():
    """Templates that keep it there cannot keep what is not sent."""
    case = report(FAMILIES["qwen3"]).case("tool calls with reasoning, dropped by the client")
    assert [loss.at for loss in case.losses] == ["tool result", "tool result", "user message"]
    assert case.by_client


def test_an_effort_at_the_top_costs_the_whole_conversation():
    told = report(FAMILIES["gpt_oss"])
    [loss] = told.case("change of reasoning_effort").losses
    assert loss.at == "the change from 'low' to 'high'"
    assert loss.lost_tokens > 0.8 * loss.known_tokens
    assert report(FAMILIES["qwen3"]).case("change of enable_thinking").status == "appends"


def test_dialogues_that_a_template_does_not_show_say_so():
    plain, gemma = report(FAMILIES["chatml"]), report(FAMILIES["gemma"], takes_images=True)
    assert plain.case("tool calls").status == plain.case("reasoning").status == "unused"
    assert gemma.case("system prompt").status == "refused"
    assert "System role not supported" in gemma.case("system prompt").error
    assert gemma.case("images").status == "appends"
    assert report(FAMILIES["mistral"]).case("tool calls").status == "loses"


def test_the_same_text_of_other_tokens_is_lost_as_tokens():
    """A template without marks between turns: its last letters merge with the next ones."""
    told = report("{% for m in messages %}{{ m.content[:-1] }}{% if not loop.last %}.{% endif %}"
                  "{% endfor %}")  # fmt: skip
    causes = {loss.cause for case in told.dialogues for loss in case.losses}
    assert causes <= {"tokens"}, "the text itself is only appended to"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content", "unexpected end of template"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[99].content.x }}", "99"),
        ("{% for m in messages %}{{ 1 // 0 }}{% endfor %}", "zero"),
    ],
)
def test_a_broken_template_gives_a_message(template: str, words: str):
    told = report(template)
    assert words in told.broken
    assert words in told.summary()
    assert not told.is_append_only
    json.dumps(told.as_dict())


def test_a_template_that_rewrites_at_random_is_reported_not_followed():
    """A template may count its own renderings or print the time; the report ends all the same."""
    told = report("{% for m in messages %}{{ range(1000) | random }}{{ m.content }}{% endfor %}")
    assert told.case("turns").status == "loses"


def test_a_template_is_rendered_once_per_text_and_tokenizer(monkeypatch: pytest.MonkeyPatch):
    first = report(FAMILIES["qwen2"])
    calls: list[Any] = []
    monkeypatch.setattr("ostinato.templates.probe.Probe.report", lambda *given: calls.append(given))
    assert report(FAMILIES["qwen2"]) is first
    assert not calls
    tokenizer = make_tokenizer()
    assert report_template(tokenizer) is None, "a tokenizer without a template"


def test_a_report_renders_a_bounded_number_of_times():
    """Some 80 renderings of a dozen short messages: tens of milliseconds on an idle core."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FAMILIES["gpt_oss"] + "{# once #}"
    count, plain = [0], tokenizer.apply_chat_template

    def counted(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return plain(*given, **named)

    tokenizer.apply_chat_template = counted
    report_template(tokenizer)
    assert 20 < count[0] < 120
