"""Breakpoints of Anthropic's and OpenAI's APIs: the tokens they cover, and those kept.

A breakpoint's position is found by rendering the conversation up to it and comparing that with the
whole prompt, so no chat template needs to be understood.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.core.tokens import num_common_tokens
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.images.parts import images_in, without_sources
from ostinato.protocol.answers import MessageUsage
from ostinato.protocol.conversation import Message
from ostinato.protocol.marks import Breakpoint
from ostinato.server.answers.call_grammar import ConversationBody
from ostinato.server.call import Covered
from ostinato.server.held_prefixes import HeldPrefixes, hold_all
from ostinato.server.prompting import render_prompt
from ostinato.server.state import ServerState
from ostinato.server.usage import Usage
from ostinato.tenants.terms import ANTHROPIC_1H

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
        usage = MessageUsage(
            input_tokens=prompt.num_prompt_tokens - prompt.num_cached_tokens - written,
            cache_read_input_tokens=prompt.num_cached_tokens,
            cache_creation_input_tokens=written,
            cache_creation={
                "ephemeral_5m_input_tokens": self.num_5m,
                "ephemeral_1h_input_tokens": self.num_1h,
            },
            output_tokens=num_output_tokens,
        )
        if prompt.num_kept_tokens:
            usage["kept_tokens"] = prompt.num_kept_tokens
        loaded: Any = {f"cache_read_{k}": n for k, n in prompt.loaded_tokens.items()}
        return {**usage, **loaded}


async def measure(
    state: ServerState,
    prompt_context: Prompt,
    body: ConversationBody,
    marks: Sequence[Breakpoint],
    tokens: TokenizedText,
    before: Sequence[Message] = (),
) -> list[Covered]:
    """Return what each mark covers and for how long, in order.

    Args:
        state: Server state.
        prompt_context: The prompt's sender, with its images.
        body: The conversation.
        marks: Its marks, in order.
        tokens: The whole prompt.
        before: Messages that precede those of the body.

    Raises:
        RequestError: The template refuses a conversation that ends at a mark.
    """
    places = []
    for mark in marks:
        part = [*before, *body.conversation(mark.num_blocks)]
        settled = partial(state.stabiliser.settle, part)
        messages = (await state.llm.tokenizing.run(settled, prompt_context.cache_salt)).messages
        images = prompt_context.images[: len(images_in(messages))]
        messages = without_sources(messages)
        if not any(message["role"] == "user" for message in messages):
            messages = [*messages, _STAND_IN]
        try:
            prompt, options = replace(prompt_context, images=images), body.template()
            options |= {"add_generation_prompt": False, "continue_final_message": False}
            head = await render_prompt(state, messages, body.tool_use, prompt, **options)
        except RequestError as error:
            raise RequestError(f"cache_control cannot be placed there: {error}") from error
        num_common = num_common_tokens(head.tokens.tokens.tobytes(), tokens.tokens.tobytes())
        num_tokens = state.llm.tokenizing.num_tokens(images, tokens.tokens[:num_common])
        places.append(Covered(num_tokens, len(images), mark.terms))
    return places


async def keep(
    held: HeldPrefixes,
    prompt_context: Prompt,
    places: Sequence[Covered],
    output: RequestOutput,
) -> Kept:
    """Lease a prompt up to its breakpoints, as soon as its first output shows it is computed."""
    done, written = output.num_cached_tokens, {True: 0, False: 0}
    async for place, num_tokens in hold_all(held, prompt_context, places, output):
        written[place.terms == ANTHROPIC_1H] += max(0, num_tokens - done)
        done = max(done, num_tokens)
    return Kept(Usage.of([output]), written[False], written[True])
