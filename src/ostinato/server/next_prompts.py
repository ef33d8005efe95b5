"""Offers the engine the prompt that will follow an answer, to be computed in idle steps.

Only where the chat template drops text at a user message, for one continuation of a conversation of
text that has ended by itself. After a call, the prompt behind its loop is prepared up to the call's
result, while the tool runs; results that come within ``_LOOP_PAUSE_S`` find nothing begun.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from ostinato.core.errors import OstinatoError
from ostinato.engine.prompts.next_prompt import known_head
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.protocol.conversation import Message, add_reasoning
from ostinato.server.answers.answer_parser import ParsedAnswer
from ostinato.server.call import GenerateCall
from ostinato.server.prompting import ChatFields, render_prompt
from ostinato.server.state import ServerState

logger = logging.getLogger("ostinato")

_LOOP_PAUSE_S = 0.1
"""Seconds after a call in which nothing is prepared: many results come sooner."""


async def offer_next(
    state: ServerState,
    body: ChatFields,
    call: GenerateCall,
    messages: Sequence[Message],
    output: RequestOutput,
    answer: ParsedAnswer,
) -> None:
    """Render the next prompt up to the user's words, and offer it; does nothing where it cannot.

    Args:
        state: Server state.
        body: Of the request: its tools and the variables of its template.
        call: The call that was answered.
        messages: The conversation up to the answer.
        output: The call's last output.
        answer: What was parsed of its first continuation.
    """
    options = body.template()
    is_opened = options.get("add_generation_prompt", True)
    is_plain = not call.prompt.images and len(output.outputs) == 1
    if not (is_plain and is_opened) or output.outputs[0].finish_reason != "stop":
        return
    message: Message = {"role": "assistant", "content": answer.text}
    if answer.has_calls:
        await asyncio.sleep(_LOOP_PAUSE_S)
        if state.num_live:
            return
        message["tool_calls"] = answer.message()["tool_calls"]
    add_reasoning(message, answer.reasoning)
    prompt = call.prompt
    render = partial(render_prompt, state, use=body.tool_use, prompt_context=prompt, **options)
    try:
        tokens = await known_head(render, messages, message)
        await state.llm.offer_next(call.request_id, prompt, tokens, answer.has_calls)
    except OstinatoError as error:  # the template refuses, or the server stops
        logger.debug("the next prompt of %s is not prepared: %s", call.request_id, error)
