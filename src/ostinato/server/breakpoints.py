"""Anthropic's breakpoints (``cache_control``): the tokens they cover, and those kept.

A breakpoint's position is found by rendering the conversation up to it and comparing that with the
whole prompt, so no chat template needs to be understood.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.core.tokens import num_common_tokens
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt, PromptDict
from ostinato.engine.text.tokenized_text import TokenizedText
from ostinato.images.parts import images_in, without_sources
from ostinato.protocol.answers import MessageUsage
from ostinato.protocol.conversation import Message
from ostinato.protocol.messages import CountBody
from ostinato.server.held_prefixes import HeldPrefixes
from ostinato.server.prompting import render_prompt
from ostinato.server.state import ServerState
from ostinato.server.usage import Usage
from ostinato.tenants.terms import ANTHROPIC_1H, LeaseTerms

_STAND_IN: Message = {"role": "user", "content": "?"}
"""Templates need a message; this one stands in where a breakpoint has none before it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Token counts of a prompt, as Anthropic's API has them.

    Attributes:
        prompt: Its tokens, and those of them that hit.
        num_5m: Tokens newly kept for five minutes.
        num_1h: Tokens newly kept for an hour.
    """

    prompt: Usage
    num_5m: int
    num_1h: int

    def usage(self, num_output_tokens: int) -> MessageUsage:
        """Return Anthropic's ``usage``; its three input counts add up to the prompt."""
        written, prompt = self.num_5m + self.num_1h, self.prompt
        more: Any = {f"cache_read_{k}": n for k, n in prompt.loaded_tokens.items()}
        if prompt.num_kept_tokens:
            more["kept_tokens"] = prompt.num_kept_tokens
        return MessageUsage(
            input_tokens=prompt.num_prompt_tokens - prompt.num_cached_tokens - written,
            cache_read_input_tokens=prompt.num_cached_tokens,
            cache_creation_input_tokens=written,
            cache_creation={
                "ephemeral_5m_input_tokens": self.num_5m,
                "ephemeral_1h_input_tokens": self.num_1h,
            },
            output_tokens=num_output_tokens,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Covered:
    """The part of a prompt that a breakpoint covers.

    Attributes:
        num_tokens: Tokens from the beginning of the prompt.
        num_images: Images among them.
        terms: Terms of the lease.
    """

    num_tokens: int
    num_images: int
    terms: LeaseTerms


async def measure(
    state: ServerState, whose: Prompt, body: CountBody, tokens: TokenizedText
) -> list[Covered]:
    """Return what each breakpoint covers and for how long, in order."""
    places = []
    for mark in body.breakpoints():
        messages = body.conversation(mark.num_blocks)
        images = whose.images[: len(images_in(messages))]
        messages = without_sources(messages)
        if not any(message["role"] == "user" for message in messages):
            messages = [*messages, _STAND_IN]
        try:
            prompt, options = replace(whose, images=images), body.template()
            options["add_generation_prompt"] = False
            head = await render_prompt(state, messages, body.tool_use(), prompt, **options)
        except RequestError as error:
            raise RequestError(f"cache_control cannot be placed there: {error}") from error
        num_common = num_common_tokens(head.tokens.tokens.tobytes(), tokens.tokens.tobytes())
        num_tokens = state.llm.tokenizing.num_tokens(images, tokens.tokens[:num_common])
        places.append(Covered(num_tokens, len(images), mark.terms))
    return places


async def keep(
    held: HeldPrefixes,
    whose: PromptDict,
    places: Sequence[Covered],
    output: RequestOutput,
) -> Kept:
    """Lease a prompt up to its breakpoints, as soon as its first output shows it is computed."""
    tokens, num_cached = output.prompt_token_ids, output.num_cached_tokens
    done, written = num_cached, {True: 0, False: 0}
    images = whose.get("multi_modal_data", {}).get("image", ())
    for place in places:
        if not place.num_tokens:
            continue
        if images:
            whose = {**whose, "multi_modal_data": {"image": images[: place.num_images]}}
        receipt = await held.hold(whose, tokens[: place.num_tokens], place.terms, num_cached)
        written[place.terms == ANTHROPIC_1H] += max(0, receipt.num_tokens - done)
        done = max(done, receipt.num_tokens)
    return Kept(Usage.of([output]), written[False], written[True])
