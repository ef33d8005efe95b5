"""Requests of tenants, and what hits."""

from ostinato import LLM, SamplingParams
from ostinato.core.identity import PrefixKey
from ostinato.engine.requests.prompts import parse_prompt

ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
ONE_LONG = SamplingParams(max_tokens=30, temperature=0.0, detokenize=False, ignore_eos=True)
SALT = "salt-of-the-tenant"
PROMPT = list(range(10, 34))
SMALL = {"num_blocks": 32, "max_model_len": 64}


def tokens_of(number: int, length: int = 24) -> list[int]:
    """Return a prompt that begins like no other, and shares no token with ``PROMPT``."""
    return [100 + number % 200, 100 + number // 200, *range(100, 98 + length)]


def flood(llm: LLM, count: int = 12) -> None:
    """Serve new prompts."""
    prompts = [tokens_of(number) for number in range(count)]
    llm.generate(prompts, ONE, use_tqdm=False)


def num_hits(llm: LLM, prompt, **salted) -> int:
    """Return how many tokens of a prompt are cached for a tenant; looked up, not served."""
    request = llm.engine.make_request(parse_prompt(salted_prompt(prompt, **salted)), ONE).request
    key = PrefixKey(request.identity, request.prompt_token_ids)
    return llm.engine.cache.manager.match(key).num_tokens


def salted_prompt(prompt: list[int], salt: str = "") -> dict:
    """Return a prompt of a tenant."""
    return {"prompt_token_ids": prompt, "cache_salt": salt}
