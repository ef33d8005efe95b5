"""The embedded model is small, whole, and has learnt Shakespeare."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import ostinato.models

FOLDER = Path(ostinato.models.__file__).parent / "tiny-shakespeare"
MEGABYTE = 1_000_000
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

# The Tempest, act 4, scene 1, and Sonnet 18; neither is in the corpus.
VERSE = """PROSPERO:
Our revels now are ended. These our actors,
As I foretold you, were all spirits and
Are melted into air, into thin air:
And, like the baseless fabric of this vision,
The cloud-capp'd towers, the gorgeous palaces,
The solemn temples, the great globe itself,
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
"""

CONVERSATION = [
    {"role": "system", "content": "Verona. A public place. "},
    {"role": "user", "content": "What news?"},
    {"role": "assistant", "content": " None, my lord.\n"},
    {"role": "user", "content": [{"type": "text", "text": "  Farewell then."}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer as a user would load it."""
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The model as a user would load it, in float32."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def nats_per_character(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Loss at each character after the first, shape (len(ids) - 1,)."""
    inputs = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], inputs[0, 1:], reduction="none")


def test_the_folder_is_complete_and_stays_below_eight_megabytes():
    """It travels inside the package, so it has a bound."""
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}

    assert sum(sizes.values()) <= 8 * MEGABYTE
    assert {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    } <= sizes.keys()  # fmt: skip


def test_the_config_promises_a_context_of_2048_and_fits_the_tokenizer(tokenizer, model):
    """Every id that the tokenizer can give has a row in the embedding."""
    assert model.config.max_position_embeddings >= 2048
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_each_character_of_the_corpus_is_one_token_and_none_is_added(tokenizer):
    """Sixty-five characters, sixty-five ids, no token for the beginning or the end."""
    ids = tokenizer(CHARACTERS)["input_ids"]

    assert len(ids) == len(set(ids)) == 65
    assert tokenizer.unk_token_id not in ids


@given(text=st.text(alphabet=CHARACTERS))
def test_every_text_in_the_alphabet_comes_back_exactly(tokenizer, text):
    """Spaces at the ends, double spaces and spaces before a comma included."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_unknown_character_becomes_one_unknown_token(tokenizer):
    """Two in a row become two, so that tokens and characters stay in step."""
    unknown = tokenizer.unk_token_id
    a, b = tokenizer("ab")["input_ids"]

    assert tokenizer("aé7b")["input_ids"] == [a, unknown, unknown, b]


@pytest.mark.parametrize("num_turns", range(1, len(CONVERSATION)))
def test_an_earlier_conversation_is_an_exact_prefix_of_a_longer_one(tokenizer, num_turns):
    """White space at the ends of a turn is kept, so a prefix cache finds every earlier turn."""
    earlier = tokenizer.apply_chat_template(CONVERSATION[:num_turns], tokenize=False)
    longer = tokenizer.apply_chat_template(CONVERSATION[: num_turns + 1], tokenize=False)

    assert longer.startswith(earlier)


def test_a_generated_answer_continues_the_prompt_that_asked_for_it(tokenizer):
    """The next turn finds the prompt with its heading, and the answer after it."""
    asked = tokenizer.apply_chat_template(
        CONVERSATION[:2], tokenize=False, add_generation_prompt=True
    )
    next_turn = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)

    assert asked == "Verona. A public place. \n\nROMEO:\nWhat news?\n\nJULIET:\n"
    assert next_turn == asked + " None, my lord.\n\n\nROMEO:\n  Farewell then.\n\n"


def test_verse_that_it_never_saw_is_familiar(tokenizer, model):
    """It reads them at 1.59 nats a character; chance is ln 68 = 4.2, letter frequencies 3.3."""
    losses = nats_per_character(model, tokenizer(VERSE)["input_ids"])

    assert losses.mean().item() < 1.7


def test_the_far_end_of_the_context_is_as_good_as_the_near_one(tokenizer, model):
    """Verse repeated up to 2,048 characters is read as well at the end as at the beginning."""
    ids = (tokenizer(VERSE)["input_ids"] * 8)[:2048]
    losses = nats_per_character(model, ids)

    assert len(ids) == 2048
    assert losses[-len(VERSE) :].mean() <= losses[: len(VERSE)].mean() + 0.1


def test_an_unknown_character_does_little_harm(tokenizer, model):
    """A prompt may hold digits: the text after them is still read as Shakespeare."""
    ids = tokenizer("4711 42\n\n" + VERSE)["input_ids"]
    losses = nats_per_character(model, ids)

    assert losses[-len(VERSE) :].mean().item() < 1.7
