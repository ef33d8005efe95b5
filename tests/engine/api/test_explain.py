"""Every miss is explained, through the public interfaces and with real models (law 10)."""

from dataclasses import replace
from html import escape

import pytest

from ostinato import LLM, Explanation, MissReason, SamplingParams, SpanOutcome
from ostinato.core.errors import RequestError
from tests.engine.loop.stepping import async_llm, last
from tests.support.engines import MakeLLM

ONE = SamplingParams(max_tokens=1, temperature=0)
PROMPT = "You are a helpful assistant. Be brief. What is a prefix cache good for, really?!"


def ask(llm: LLM, prompt, params: SamplingParams = ONE):
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return output


def explained(llm: LLM, prompt, params: SamplingParams = ONE, **how) -> Explanation:
    """Run a prompt; its explanation agrees with its output."""
    output = ask(llm, prompt, params)
    explanation = llm.explain(output, **how)
    assert explanation == llm.explain(output.request_id, **how)
    assert explanation.num_tokens == len(output.prompt_token_ids)
    assert explanation.num_cached_tokens == output.num_cached_tokens
    assert explanation.num_copied_tokens == output.num_copied_tokens
    return explanation


def test_one_character_breaks_the_cache_and_is_shown(bard):
    """The article's example: an edit in the third block, and one at the very start."""
    assert explained(bard, PROMPT).reasons == ("never seen",)
    edited = explained(bard, PROMPT.replace("What", "That"))
    assert edited.reasons == ("differs",)
    assert edited.num_cached_tokens == 39
    assert edited.difference is not None
    assert edited.difference.lines == (
        "  request-0  …pful assistant. Be brief. What is a prefix cache g",
        "this prompt  …pful assistant. Be brief. That is a prefix cache g",
        "                                        ^ token 39 in line 1, column 40",
    )
    assert edited.difference.mine[edited.difference.caret] == "T"
    assert edited.difference.theirs[edited.difference.caret] == "W"
    assert (edited.difference.token, edited.difference.place) == (39, "line 1, column 40")
    first = explained(bard, "y" + PROMPT[1:])
    assert (first.num_cached_tokens, first.reasons) == (0, ("differs",))
    assert first.difference is not None and first.difference.num_alike_after == 79


def test_a_difference_in_a_conversation_names_the_message(bard):
    system = "You are the ghost of a king. It is ten past nine."
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Who art thou?"},
    ]
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    bard.chat(messages, ONE, chat_template=template, use_tqdm=False)
    messages[0]["content"] = system.replace("nine", "ten")
    [output] = bard.chat(messages, ONE, chat_template=template, use_tqdm=False)
    difference = bard.explain(output).difference
    assert difference is not None
    assert difference.place == "messages[0] (system), line 1, column 45"


def test_the_same_text_in_other_tokens(make_llm: MakeLLM):
    """The tokenizer would not cut it so; a caller that sends ids may."""
    llm = make_llm("llama", num_blocks=64)
    tokenizer = llm.get_tokenizer()
    merged = tokenizer("the the the the the the", add_special_tokens=False)["input_ids"]
    letters = [
        token
        for letter in tokenizer.decode(merged)
        for token in tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]
    assert tokenizer.decode(letters) == tokenizer.decode(merged) and letters != merged
    ask(llm, merged[:4] + merged)
    explanation = explained(llm, merged[:4] + letters)
    assert explanation.reasons == ("same text, other tokens",)

    ask(llm, merged + merged)
    explanation = explained(llm, letters + merged)
    assert explanation.reasons == ("same text, other tokens",)
    assert "Move" not in str(explanation), "nothing changes that could be moved"


def test_another_tenant_is_mentioned_to_administrators_alone(bard):
    ask(bard, {"prompt": PROMPT, "cache_salt": "ann-salt"})
    mine = {"prompt": PROMPT, "cache_salt": "bob-salt"}
    assert explained(bard, mine).reasons == ("never seen",)
    bard.reset_prefix_cache()
    ask(bard, {"prompt": PROMPT, "cache_salt": "ann-salt"})
    told = explained(bard, mine, administrator=True)
    assert "other tenant" in told.reasons or "removed" in told.reasons
    assert "ann-salt" not in str(told.as_dict())


def test_a_reset_and_new_weights_are_told_apart(make_llm: MakeLLM):
    llm = make_llm("llama", own_weights=True, num_blocks=64)
    prompt = list(range(3, 30))
    ask(llm, prompt)
    llm.reset_prefix_cache()
    assert explained(llm, prompt).reasons == ("removed", "last token")
    name, tensor = next(iter(llm.engine.loaded.model.state_dict().items()))
    llm.update_weights({name: tensor * 1.5})
    assert explained(llm, prompt).reasons == ("other weights", "last token")


def test_the_next_turn_misses_the_one_token_that_was_sampled_last(bard):
    """It was sampled, and nothing came after it."""
    output = ask(bard, PROMPT, SamplingParams(max_tokens=8, temperature=0))
    turn = output.prompt_token_ids + output.outputs[0].token_ids
    told = explained(bard, [*turn, 5, 6])
    assert told.reasons == ("never computed", "never seen")
    assert told.num_cached_tokens == len(turn) - 1


def test_after_a_tenant_was_erased_nothing_of_it_is_remembered(bard):
    output = ask(bard, {"prompt": PROMPT, "cache_salt": "ann"})
    bard.erase("ann")
    with pytest.raises(RequestError, match="is not remembered"):
        bard.explain(output)
    assert explained(bard, {"prompt": PROMPT, "cache_salt": "ann"}).reasons == ("never seen",)


def test_what_was_not_to_be_kept_is_explained_from_its_output_alone(bard):
    ask(bard, PROMPT)
    output = ask(bard, {"prompt": PROMPT + "?", "cache_write": False})
    assert bard.explain(output).reasons == ("differs",)
    assert bard.explain(output.request_id).reasons == ("not kept",)


def test_explanations_can_be_switched_off(make_llm: MakeLLM):
    llm = make_llm("llama", num_blocks=16, keep_explanations=0)
    with pytest.raises(RequestError, match="keep_explanations=0"):
        llm.explain(ask(llm, [3, 4, 5]))


async def test_the_face_with_an_event_loop_explains_as_well(checkpoints):
    with async_llm(checkpoints) as llm:
        await last(llm.generate(list(range(3, 20)), ONE))
        output = await last(llm.generate([*range(3, 15), 40], ONE))
        assert await llm.explain(output.request_id) == await llm.explain(output)
        assert (await llm.explain(output)).reasons == ("differs",)


def test_a_notebook_shows_a_table_whose_texts_are_escaped(bard):
    """Names of requests come from callers, and may hold markup."""
    explained(bard, "Notes for a friend who reads them in a browser.")
    explanation = explained(bard, "Notes for a friend who hears them in a theatre.")
    first, *others = explanation.spans
    named = replace(
        first, outcome=SpanOutcome.COMPUTED, reason=MissReason.DIFFERS, request="<script>alert(1)"
    )

    shown = replace(explanation, spans=(named, *others))._repr_html_()

    assert shown.count("<tr>") == 1 + len(explanation.spans)
    assert all(escape(span.sentence) in shown for span in others)
    assert explanation.difference is not None
    assert escape(explanation.difference.lines[0]) in shown
    assert "<script" not in shown and "&lt;script&gt;alert(1)" in shown
