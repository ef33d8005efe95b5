"""The likelihood of given continuations of a prompt: multiple choice.

Each choice is a request of the prompt and the choice, whose log-probabilities begin with the
choice; all of them read the prompt's keys and values::

    prompt ───────────┬─ choice A     logits of the choice's tokens alone
                      ├─ choice B
                      └─ choice C
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ostinato.core.tokens import num_common_tokens
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.errors import RequestError


@dataclass(frozen=True, slots=True)
class Choice:
    """One given continuation.

    Attributes:
        index: Its place among the choices.
        text: As given; None for token ids.
        logprob: Natural logarithm of its probability behind the prompt: the sum over its tokens.
        num_tokens: Its tokens.
        is_greedy: Whether each token is the most likely one, so that sampling at temperature 0
            would begin with it.
        probability: Its share of the probability of all choices.
    """

    index: int
    text: str | None
    logprob: float
    num_tokens: int
    is_greedy: bool
    probability: float


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The choices of one prompt.

    Attributes:
        choices: In the order in which they were given.
        request_ids: Names of their requests, for ``explain``.
        num_prompt_tokens: Tokens of all prompts with their choices.
        num_cached_tokens: Those whose KV came from the cache.
    """

    choices: list[Choice]
    request_ids: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def best(self) -> Choice:
        """The most likely one."""
        return max(self.choices, key=lambda choice: choice.logprob)


def choice_prompt(
    prompt: Prompt,
    choice: str | Sequence[int],
    token_ids: Callable[[Prompt], "array[int]"],
) -> tuple[Prompt, SamplingParams]:
    """Return the request of a choice.

    Of two texts the whole is tokenized, as a model reads it; the choice begins where the tokens are
    no longer those of the prompt alone. Of token ids they are joined.

    Args:
        prompt: What precedes the choice.
        choice: A text or token ids, as the prompt.
        token_ids: Tokenizes a prompt, and places its images.

    Raises:
        RequestError: One is a text and the other is not, or the choice has no tokens.
        PromptTooLong: They are certainly longer than the model takes.
    """
    is_text = isinstance(choice, str)
    if is_text is (prompt.text is None):
        raise RequestError("prompt and choices: give texts for all of them, or token ids for all")
    before = token_ids(prompt)
    if isinstance(choice, str):
        whole = token_ids(replace(prompt, text=f"{prompt.text}{choice}"))
    else:
        whole = before + token_ids(replace(prompt, token_ids=choice, images=()))
    start = num_common_tokens(before.tobytes(), whole.tobytes())
    if start >= len(whole) or not start:
        raise RequestError(
            f"choice={choice!r:.80}: prompt and choice need a token each, and they have "
            f"{len(before)} and {len(whole) - len(before)}"
        )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=0,
        prompt_logprob_start=start,
    )
    return replace(prompt, token_ids=whole, known=None), params


def read_choices(
    outputs: Sequence[RequestOutput], choices: Sequence[str | Sequence[int]]
) -> ChoiceOutput:
    """Return the choices of finished requests, in their order."""
    rows = []
    for output in outputs:
        positions = [each for each in output.prompt_logprobs or () if each is not None]
        rows.append([next(iter(each.values())) for each in positions])
    sums = [math.fsum(entry.logprob for entry in row) for row in rows]
    highest = max(sums)
    total = math.fsum(math.exp(value - highest) for value in sums)
    return ChoiceOutput(
        [
            Choice(
                index,
                choice if isinstance(choice, str) else None,
                value,
                len(row),
                all(entry.rank == 1 for entry in row),
                math.exp(value - highest) / total,
            )
            for index, (choice, value, row) in enumerate(zip(choices, sums, rows, strict=True))
        ],
        [output.request_id for output in outputs],
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
    )
