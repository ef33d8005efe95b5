"""Prompts on one note for a real model, and its answers."""

import asyncio
from typing import Any

from ostinato import RequestOutput, SamplingParams
from ostinato.server.state import ServerState

NUM_NEW = 8
"""Tokens of an answer, unless a test asks for more."""

SYSTEM = (
    "You answer questions about this note. The river Ostra rises in the hills of Mern and flows "
    "north for two hundred kilometres to the port of Vell. Its water is cold and clear. Barges "
    "carry timber and salt; in winter the upper river freezes, and the barges wait at Tarn."
)


def prompt_ids(state: ServerState, *turns: str) -> list[int]:
    """Write a conversation on the note, users first, as the model reads it."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    tokenizer = state.llm.engine.loaded.require_tokenizer()
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def answers(state: ServerState, prompts: list[list[int]], **params: Any) -> list[RequestOutput]:
    """Answer prompts greedily, all at once."""
    settled = SamplingParams(**{"temperature": 0, "max_tokens": NUM_NEW, **params})

    async def one(prompt: list[int]) -> RequestOutput:
        async for output in state.llm.generate({"prompt_token_ids": prompt}, settled):
            last = output
        return last

    async def all_of_them() -> list[RequestOutput]:
        return list(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(all_of_them())
