"""Replays a group of requests, and counts computed tokens.

Requests run one after another on the real cache, large enough that nothing is evicted, so every
miss is due to content.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.assembly import build_cache
from ostinato.core.identity import PrefixKey
from ostinato.lab.lint.rewrites import Remedy
from ostinato.lab.log.request_log import LoggedRequest
from ostinato.lab.replay.explain_log import Tokenizer, identity_of
from ostinato.observe.prompt_diff import num_alike
from ostinato.settings import PrefixCacheConfig

MIN_SAVING = 0.01
"""Minimum share of the prompt tokens that a fix must save; a few are saved by chance."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        prompt_tokens: Tokens of all prompts.
        computed_tokens: Tokens computed by the model.
    """

    prompt_tokens: int
    computed_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that hit, from 0 to 1."""
        if not self.prompt_tokens:
            return 0.0
        return 1 - self.computed_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """What requests compute without a fix and with it.

    Attributes:
        remedy: The fix.
        num_requests: Requests that it concerns.
        before: What they compute without it.
        after: What they compute with it.
    """

    remedy: Remedy
    num_requests: int
    before: Replayed
    after: Replayed

    @property
    def saved_tokens(self) -> int:
        """Tokens that are not computed with it."""
        return self.before.computed_tokens - self.after.computed_tokens

    @property
    def matters(self) -> bool:
        """Whether it saves more than ``MIN_SAVING``."""
        return self.saved_tokens > MIN_SAVING * self.before.prompt_tokens


class Seams:
    """Texts seen so far, with their tokens: what follows one of them is tokenized by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start empty."""
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._tokens: dict[str, array[int]] = {}

    def add(self, text: str, tokens: list[int]) -> None:
        """Note a text and the tokens that it has in the cache."""
        if text and text not in self._tokens:
            insort(self._texts, text)
            self._tokens[text] = array("I", tokens)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text: the longest part seen before as it was, then the rest."""
        known = self._longest_known(text)
        if not known:
            return self._tokenizer.encode(text)
        return [*self._tokens[known], *self._tokenizer.encode(text[len(known) :])]

    def _longest_known(self, text: str) -> str:
        """Find the longest text seen that this one begins with; each try costs O(log n)."""
        query = text
        while query:
            place = bisect_right(self._texts, query)
            candidate = self._texts[place - 1] if place else ""
            if text.startswith(candidate):
                return candidate
            query = query[: num_alike(candidate, query)]
        return ""


def replay(
    requests: Sequence[LoggedRequest],
    tokenizer: Tokenizer,
    block_size: int,
    keep_seams: bool = False,
) -> Replayed:
    """Serve requests in order, with the answers that were logged.

    With ``keep_seams``, text that was seen before keeps the tokens that it had.
    """
    seams = Seams(tokenizer)
    keys: list[tuple[PrefixKey, list[int]]] = []
    for request in requests:
        text = tokenizer.render(request)
        tokens = seams.encode(text) if keep_seams else tokenizer.encode(text)
        answer = tokenizer.encode(request.answer) if request.answer else []
        if tokens:
            keys.append((PrefixKey(identity_of(request), tokens), answer))
        if tokens and keep_seams:
            seams.add(text, tokens)
            seams.add(text + request.answer, tokens + answer)
    return _serve(keys, block_size)


def replay_ids(requests: Sequence[LoggedRequest], block_size: int) -> Replayed:
    """Serve requests one after the other, with the token ids that were logged."""
    rows = [(array("I", r.prompt_ids), array("I", r.reply_ids).tolist(), r) for r in requests]
    return _serve([(PrefixKey(identity_of(r), ids), answer) for ids, answer, r in rows], block_size)


def _serve(keys: list[tuple[PrefixKey, list[int]]], block_size: int) -> Replayed:
    num_blocks = 1 + sum((len(k) + len(answer)) // block_size + 2 for k, answer in keys)
    config = PrefixCacheConfig(num_blocks, block_size, keep_explanations=0)
    cache, prompt_tokens, computed = build_cache(config, lambda: 0.0).manager, 0, 0
    for key, answer in keys:
        admitted = cache.admit(key, cache.match(key))
        assert admitted is not None, "there is room for everything"
        table, _ = admitted
        prompt_tokens += len(key)
        computed += len(key) - table.num_cached_tokens
        for token in answer:
            key.append(token)
        cache.grow(table, len(key))
        num_computed = len(key) - bool(answer)  # the last token of an answer is not computed
        cache.publish(table, num_computed)
        cache.commit()
        cache.release(table, num_computed)
    return Replayed(prompt_tokens, computed)
