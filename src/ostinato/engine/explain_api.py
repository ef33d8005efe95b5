"""Explains a request of an engine.

The history of the cache knows what was admitted and lost; the engine adds the tokenizer, and the
output adds tokens that the history was told not to keep.
"""

from functools import partial

from ostinato.core.tokens import pack_tokens
from ostinato.engine.engine import Engine
from ostinato.engine.image_prompts import decode_prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation


def explain_request(
    engine: Engine,
    request: RequestOutput | str,
    administrator: bool,
    cache_salt: str | None = None,
) -> Explanation:
    """Explain which tokens of a request's prompt hit, and why the others missed.

    Args:
        engine: The engine that served it.
        request: Its output, or its name.
        administrator: Whether other tenants may be mentioned.
        cache_salt: Of the tenant that asks, which sees its own requests only; None sees all.

    Raises:
        RequestError: It is not remembered, or not the tenant's.
    """
    tokenizer = engine.loaded.tokenizer
    decode = None
    if tokenizer is not None:
        spell = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

        def decode(ids: list[int]) -> str:
            return decode_prompt(ids, spell, engine.loaded.vision)

    name = request if isinstance(request, str) else request.request_id
    prompt = b""
    if not isinstance(request, str):
        prompt = pack_tokens(request.prompt_token_ids).tobytes()
    tenant = None if cache_salt is None else cache_salt.encode()
    return explain(engine.cache.history, name, Viewer(administrator, decode, prompt, tenant))
