"""A prefix that is requested repeatedly is leased once."""

import asyncio

from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.server.held_prefixes import HeldPrefixes
from ostinato.server.state import ServerState
from ostinato.tenants.terms import ANTHROPIC_1H, ANTHROPIC_5M

TOKENS = list(range(5, 69))
WHOSE = Prompt(cache_salt="")


async def test_a_prefix_is_leased_once_while_its_lease_runs(scribe: tuple[str, ServerState]):
    """Twice at once, again later, for another time, under another salt, and after its end."""
    llm = scribe[1].llm

    held = HeldPrefixes(llm)
    async for _ in llm.generate(TOKENS, SamplingParams(max_tokens=1)):
        pass

    one, two = await asyncio.gather(
        held.hold(WHOSE, TOKENS, ANTHROPIC_5M, 0),
        held.hold(WHOSE, TOKENS, ANTHROPIC_5M, len(TOKENS)),
    )
    later = await held.hold(WHOSE, TOKENS, ANTHROPIC_5M, len(TOKENS))
    assert one.lease_id == two.lease_id == later.lease_id and one.num_tokens == len(TOKENS)
    hour = await held.hold(WHOSE, TOKENS, ANTHROPIC_1H, len(TOKENS))
    assert hour.lease_id != one.lease_id and len(held) == 2

    assert one.lease_id is not None and await llm.end_lease(one.lease_id)
    anew = await held.hold(WHOSE, TOKENS, ANTHROPIC_5M, len(TOKENS))
    assert anew.lease_id != one.lease_id and anew.num_tokens == len(TOKENS)

    unknown = await held.hold(Prompt(cache_salt="x"), TOKENS, ANTHROPIC_5M, 0)
    assert unknown.lease_id is None, "what is not cached is not held"
    assert (held.erase("x"), held.erase(""), len(held)) == (0, 2, 0)
    await llm.reset_prefix_cache()
