"""Every output has the requested form, without an effect on other requests."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from ostinato import LLM, SamplingParams, StructuredOutputs
from ostinato.engine.grammar.grammar import GrammarCompiler
from ostinato.engine.grammar.grammar_check import GrammarChecker
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.errors import InvalidSamplingParams, MissingTokenizer, StepFailed
from tests.engine.loop.stepping import async_llm
from tests.support.engines import MakeLLM, assert_idle
from tests.support.models.checkpoints import Checkpoints, without_tokenizer
from tests.support.models.model_families import EOS_ID

PROMPTS = ["The same prefix, another suffix", "Once upon a time", "You are a helpful assistant."]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scribe(checkpoints: Checkpoints) -> Iterator[LLM]:
    """Lend a random Llama with a byte-level BPE tokenizer, which can write JSON."""
    llm = LLM(str(checkpoints.path("llama")), dtype="float64", block_size=4, num_blocks=256)
    yield llm
    llm.engine.cache.manager.check()
    assert_idle(llm.engine)


def asked(form: dict[str, Any], **params: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=StructuredOutputs(**form), **{"max_tokens": 200, "seed": 7, **params}
    )


def run(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    return [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        set(person) == {"name", "age", "mood"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 6
        and 0 <= person["age"] <= 130
        and person["mood"] in ("glad", "sad")
    )


# --- each kind ---


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_schema_is_kept_by_a_model_that_knows_nothing(scribe: LLM, temperature: float):
    """Random weights, any temperature: the text is what the schema says, and ends by itself."""
    for output in run(scribe, PROMPTS, asked({"json": PERSON}, temperature=temperature)):
        assert is_person(output.text), output.text
        assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_schema_may_be_given_as_its_text(scribe: LLM):
    mapping, text = (
        run(scribe, PROMPTS[0], asked({"json": schema}))[0].text
        for schema in (PERSON, json.dumps(PERSON))
    )
    assert mapping == text


def test_an_object_is_an_object(scribe: LLM):
    """Any object may go on for ever: so far as it goes, it is one."""
    outputs = run(scribe, PROMPTS * 4, asked({"json_object": True}, temperature=2.0))

    assert all(output.text.startswith("{") for output in outputs)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert all(isinstance(json.loads(output.text), dict) for output in ended)


def test_a_regex_is_matched_by_the_whole_text(scribe: LLM):
    pattern = r"\d{3}-[a-f]{2,4}!"
    for output in run(scribe, PROMPTS, asked({"regex": pattern}, temperature=2.0)):
        assert re.fullmatch(pattern, output.text) and output.finish_reason == "stop"


def test_a_choice_is_one_of_the_texts(scribe: LLM):
    """A text that begins another one can be chosen as well as that."""
    choice = ["yes", "yes indeed", 'né "quoted"\n', "🎶"]
    params = asked({"choice": choice}, temperature=5.0, n=24)
    [output] = scribe.generate(PROMPTS[0], params, use_tqdm=False)

    texts = [completion.text for completion in output.outputs]
    assert set(texts) <= set(choice) and len(set(texts)) > 1


@pytest.mark.parametrize(
    "grammar",
    ['start: pair ("," pair)?\npair: /[a-z]/ "=" /[0-9]/', 'root ::= [a-z] "=" [0-9]'],
    ids=["lark", "gbnf"],
)
def test_a_grammar_may_be_in_either_notation(scribe: LLM, grammar: str):
    [output] = run(scribe, PROMPTS[0], asked({"grammar": grammar}, temperature=2.0))
    assert re.fullmatch(r"[a-z]=\d(,[a-z]=\d)?", output.text)


def test_the_embedded_model_keeps_forms_that_its_letters_can_write(bard: LLM):
    [answer] = run(bard, "ROMEO:\n", asked({"choice": ["Ay, my lord.", "Nay, sir."]}))
    assert answer.text in ("Ay, my lord.", "Nay, sir.") and answer.finish_reason == "stop"

    [line] = run(bard, "ROMEO:\n", asked({"regex": r"[A-Z][a-z]{1,5}( [a-z]{1,6}){2}[.!?]"}))
    assert re.fullmatch(r"[A-Z][a-z]{1,5}( [a-z]{1,6}){2}[.!?]", line.text)


# --- with everything else ---


def test_strangers_in_the_batch_keep_their_text(scribe: LLM):
    """A request beside one with a form and one with another: its text is its own."""
    free = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    alone = run(scribe, PROMPTS[0], free)[0].text
    params = [free, asked({"json": PERSON}), asked({"regex": "[ab]{40}"})]

    mixed = run(scribe, [PROMPTS[0]] * 3, params)

    assert mixed[0].text == alone
    assert is_person(mixed[1].text) and re.fullmatch("[ab]{40}", mixed[2].text)


def test_every_continuation_has_a_form_of_its_own(scribe: LLM):
    """``n`` samples fork after the prompt, and no fork moves another's form."""
    params = asked({"json": PERSON}, n=6, temperature=1.5)
    [output] = scribe.generate(PROMPTS[0], params, use_tqdm=False)

    texts = [completion.text for completion in output.outputs]
    assert all(map(is_person, texts)) and len(set(texts)) > 1


def test_the_form_outlives_preemption(make_llm: MakeLLM, index: str):
    """A pool too small for three: what is preempted comes back and goes on where it was."""
    params = [asked({"json": PERSON}, seed=seed, temperature=1.5) for seed in range(3)]
    roomy = run(make_llm("llama", index=index, num_blocks=200), PROMPTS, params)
    llm = make_llm("llama", index=index, num_blocks=24)

    tight = run(llm, PROMPTS, params)

    assert llm.engine.scheduler_stats.num_preemptions > 0
    assert [o.text for o in tight] == [o.text for o in roomy]
    assert all(is_person(o.text) for o in tight)


def test_the_last_step_may_be_the_first(scribe: LLM):
    """A form of one token ends with it; its end needs no end-of-sequence id."""
    [output] = run(scribe, PROMPTS[0], asked({"regex": "x"}))
    assert (output.text, len(output.token_ids), output.finish_reason) == ("x", 1, "stop")


def test_max_tokens_cuts_a_form_and_says_so(scribe: LLM):
    [output] = run(scribe, PROMPTS[0], asked({"regex": "[ab]{40}"}, max_tokens=5))
    assert output.finish_reason == "length" and re.match("[ab]+", output.text)


def test_a_stop_string_cuts_a_form(scribe: LLM):
    [output] = run(scribe, PROMPTS[0], asked({"regex": "abc+d"}, stop=["b"]))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")


def test_min_tokens_keeps_a_form_from_ending_early(scribe: LLM):
    """``x+`` might end after the first; so many tokens come first. What cannot go on ends."""
    long, short = run(
        scribe,
        [PROMPTS[0]] * 2,
        [asked({"regex": "x+"}, min_tokens=9), asked({"regex": "xy"}, min_tokens=9)],
    )
    assert len(long.token_ids) >= 9 and re.fullmatch("x+", long.text)
    assert (short.text, short.finish_reason) == ("xy", "stop")


def test_a_form_that_may_end_ends_with_the_models_own_id(scribe: LLM):
    """With ``ignore_eos`` it goes on as long as the form lets it."""
    ends, goes_on = run(
        scribe,
        [PROMPTS[0]] * 2,
        [
            asked({"regex": "x+"}, logit_bias={EOS_ID: 100}),
            asked({"regex": "x+"}, logit_bias={EOS_ID: 100}, ignore_eos=True, max_tokens=9),
        ],
    )
    assert (ends.text, ends.token_ids[-1], ends.finish_reason) == ("x", EOS_ID, "stop")
    assert (len(goes_on.token_ids), goes_on.finish_reason) == (9, "length")


def test_log_probabilities_are_the_models_own(scribe: LLM):
    """What the model thought before the form: the sampled id may be of any rank."""
    [output] = run(scribe, PROMPTS[0], asked({"regex": "[0-9]{4}"}, logprobs=2))
    ranks = [next(iter(entry.values())).rank for entry in output.logprobs]
    assert len(ranks) == len(output.token_ids) and max(ranks) > 1


async def test_a_stream_grows_into_the_form(checkpoints: Checkpoints):
    params = asked({"json": PERSON})
    with async_llm(checkpoints, num_blocks=128, max_model_len=256) as llm:
        texts = [o.outputs[0].text async for o in llm.generate(PROMPTS[1], params)]

    assert len(texts) > 3 and is_person(texts[-1])
    assert all(late.startswith(early) for early, late in pairwise(texts))


# --- what is refused, and what fails ---


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "nope"}}, "json.*Invalid type: nope"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys.*uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/no"}}, "Pointer '/no' does not exist"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": 'start: "a" b'}, 'unknown name: "b"'),
        ({"grammar": "no grammar"}, "grammar="),
    ],
)
def test_a_broken_form_is_refused_before_anything_runs(scribe: LLM, form, message):
    with pytest.raises(InvalidSamplingParams, match=message):
        scribe.generate(PROMPTS, asked(form), use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "structured_outputs has nothing: give one of json, "),
        ({"regex": "a", "json_object": True}, "has json_object and regex: give one"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[1]"}, "a JSON schema is an object"),
        ({"json": {"x": object()}}, "is no JSON"),
        ({"regex": 3}, "regex=3: must be a text"),
        ({"choice": []}, "at least one"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json_object": "yes"}, "must be a bool"),
        ({"regex": "\ud83d"}, "half of a character"),
        ({"regex": "a" * 200_001}, "200001 characters: at most 200000"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], message: str):
    with pytest.raises(InvalidSamplingParams, match=message):
        StructuredOutputs(**form)
    with pytest.raises(InvalidSamplingParams, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_what_the_letters_cannot_write_is_refused(bard: LLM):
    """The embedded model knows neither braces nor quotation marks."""
    for form in ({"json_object": True}, {"json": PERSON}, {"choice": ["a", "{b}"]}):
        with pytest.raises(InvalidSamplingParams, match="lacks characters"):
            bard.generate("ROMEO:", asked(form), use_tqdm=False)
    with pytest.raises(InvalidSamplingParams, match="no token of this model's vocabulary"):
        bard.generate("ROMEO:", asked({"regex": '"x'}), use_tqdm=False)


def test_a_model_without_tokenizer_refuses_forms(checkpoints: Checkpoints, tmp_path: Any):
    path = without_tokenizer(checkpoints.path("llama"), tmp_path / "mute")
    llm = LLM(str(path), num_blocks=16)
    with pytest.raises(MissingTokenizer, match=r"structured_outputs\.regex cannot be kept"):
        llm.generate([[5, 6]], asked({"regex": "a"}, detokenize=False), use_tqdm=False)


def test_a_form_at_a_dead_end_costs_its_own_request(bard: LLM):
    """After two letters comes a brace, which the model cannot write; its neighbours go on."""
    fine = asked({"regex": "[a-z]{6}"})
    with pytest.raises(StepFailed, match=r"1 of 3 requests failed: .*cannot be written") as info:
        bard.generate(
            ["A", "B", "C"], [fine, asked({"regex": "[a-z]{2}[{]"}), fine], use_tqdm=False
        )

    outputs = [output.outputs[0] for output in info.value.outputs]
    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert re.fullmatch("[a-z]{6}", outputs[2].text)
    bard.engine.cache.manager.check()


class _CountingChecker(GrammarChecker):
    """Refuses every grammar, and counts how many it was asked about."""

    num_checked = 0

    def check(self, grammar: str) -> str:
        self.num_checked += 1
        return "refused"


def test_a_grammar_is_tried_once_for_each_tenant(scribe: LLM):
    """What one tenant asked for does not show in another's time, nor is a bomb tried twice."""
    checker = _CountingChecker()
    forms = GrammarCompiler(scribe.engine.loaded, checker)
    for tenant in ("ann", "bob", "ann"):
        with pytest.raises(InvalidSamplingParams, match=r"refused$"):
            forms.compile(StructuredOutputs(regex="x"), tenant)
    assert checker.num_checked == 2


def test_a_model_without_end_of_sequence_keeps_forms(checkpoints: Checkpoints):
    """What must end ends by itself; what may go on goes on."""
    llm = LLM(str(checkpoints.path("llama", eos_token_id=None)), num_blocks=64)
    params = [asked({"regex": "xy{2}"}), asked({"regex": "x+"}, max_tokens=30, temperature=5.0)]
    ends, goes_on = run(llm, [PROMPTS[0]] * 2, params)
    assert (ends.text, ends.finish_reason) == ("xyy", "stop")
    assert re.fullmatch("x+", goes_on.text) and goes_on.finish_reason == "length"
    assert len(goes_on.token_ids) == 30


def test_a_form_waits_for_the_end_of_what_is_free(scribe: LLM):
    """Begun free, all may come until the expression is passed; else the first token decides."""
    compiler = GrammarCompiler(scribe.engine.loaded)
    tokens = TokenTable(scribe.engine.loaded.require_tokenizer())
    ids = {text: tokens.id_of(text) for text in ("a", "b", "x", "<")}

    def allowed(constraint: Any, text: str) -> bool:
        place = ids[text]
        return bool(constraint.mask()[place // 8] >> place % 8 & 1)

    free = compiler.compile(StructuredOutputs(choice=["ab"], after="x<"), "")
    for text, ends in (("x", False), ("b", False), ("x", False), ("<", True)):
        assert allowed(free, text) and not free.is_complete
        copied = free.copy()
        free.advance(ids[text])
        assert allowed(free, "b") != ends and allowed(copied, "b")
    for text in "ab":
        assert allowed(free, text)
        free.advance(ids[text])
    assert free.is_complete and not free.error

    asked = StructuredOutputs(choice=["ab"], after="x", opening="<")
    for first, is_free in (("<", True), ("a", False)):
        undecided = compiler.compile(asked, "")
        assert allowed(undecided, first) and not allowed(undecided, "x")
        undecided.advance(ids[first])
        assert allowed(undecided, "x") == is_free
    with pytest.raises(InvalidSamplingParams, match="is no expression"):
        StructuredOutputs(choice=["ab"], after="(")
