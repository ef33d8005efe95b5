"""The calls of the demo, and their timing.

The calls share a system prompt of 512 tokens, followed by 16 unique tokens; a token of the bundled
model is a character. Other models get questions in words about a note of one page, counted in their
own tokens. A wave is many calls submitted at once; seconds are wall-clock time.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product
from statistics import median
from typing import TYPE_CHECKING

from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.errors import StepFailed

if TYPE_CHECKING:
    from ostinato import RequestOutput
    from ostinato.engine.loop.engine import Engine
    from ostinato.engine.requests.request_validation import PreparedRequest

Watch = Callable[[int, int], None]
"""Called after each step, with calls answered and prompt tokens computed so far."""

OUTPUT_TOKENS = 4

_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Wave:
    """The result of a wave.

    Attributes:
        num_calls: Prompts that were submitted.
        prompt_tokens: All their tokens.
        computed_tokens: Prompt tokens computed by the model.
        seconds: From the first submission to the last answer, or to the time limit.
        answers: Texts by number of the prompt; incomplete if time ran out.
    """

    num_calls: int
    prompt_tokens: int
    computed_tokens: int
    seconds: float
    answers: dict[int, str]

    @property
    def complete(self) -> bool:
        """Whether every call was answered."""
        return len(self.answers) == self.num_calls


@dataclass(frozen=True, slots=True)
class CallTime:
    """Time to first token of a single call.

    Attributes:
        computed_tokens: Prompt tokens that it computed.
        seconds: Median over a few trials.
    """

    computed_tokens: int
    seconds: float


def run_wave(
    engine: "Engine", prompts: list[str], watch: Watch, limit_s: float | None = None
) -> Wave:
    """Submit prompts at once to an idle engine, and answer them with four tokens each.

    The time limit is checked after each step.

    Raises:
        StepFailed: A forward pass raised.
    """
    counts = engine.scheduler_stats
    before = counts.computed_prompt_tokens
    start_s = time.perf_counter()
    requests = _submit(engine, prompts, OUTPUT_TOKENS)
    numbers: dict[str, int] = {
        request.request.request_id: number for number, request in enumerate(requests)
    }
    answers: dict[int, str] = {}
    while engine.has_work:
        for output in _step(engine):
            answers[numbers[output.request_id]] = output.outputs[0].text
        watch(len(answers), counts.computed_prompt_tokens - before)
        if limit_s is not None and time.perf_counter() - start_s > limit_s:
            break
    seconds = time.perf_counter() - start_s
    for request in requests:  # the unfinished ones
        engine.cancel(request.request.request_id)
    tokens = sum(len(request.request.prompt_token_ids) for request in requests)
    return Wave(len(requests), tokens, counts.computed_prompt_tokens - before, seconds, answers)


def first_tokens(engine: "Engine", cold: str, warm: str) -> tuple[CallTime, CallTime]:
    """Measure two calls one after the other on an idle engine, after resetting its cache."""
    trials = []
    for _ in range(_TRIALS):
        engine.reset_cache()
        trials.append((_alone(engine, cold), _alone(engine, warm)))
    first, second = zip(*trials, strict=True)
    return _middle(first), _middle(second)


def _submit(engine: "Engine", prompts: list[str], output_tokens: int) -> "list[PreparedRequest]":
    """Add prompts to the engine without running them."""
    from ostinato.engine.requests.prompts import Prompt

    params = SamplingParams(max_tokens=output_tokens, temperature=0)
    requests = [engine.make_request(Prompt(text=prompt), params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    return requests


def _step(engine: "Engine") -> "list[RequestOutput]":
    """Run one step and return the finished outputs."""
    ended = [state.output() for state in engine.step() if state.finished]
    for output in ended:
        if output.error is not None:
            raise StepFailed(output.error, ended)
    return ended


def _alone(engine: "Engine", prompt: str) -> "RequestOutput":
    """Answer a single call with one token."""
    _submit(engine, [prompt], 1)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += _step(engine)
    return outputs[0]


def _middle(outputs: "tuple[RequestOutput, ...]") -> CallTime:
    """Take the median of equal calls."""
    computed = [len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs]
    seconds = [output.timings.time_to_first_token or 0.0 for output in outputs]
    return CallTime(round(median(computed)), median(seconds))


SYSTEM_TOKENS = 512
SUFFIX_TOKENS = 16

SYSTEM_PROMPT = (
    "PROLOGUE:\n"
    "Attend, ye players, ere the play begin,\n"
    "And keep these orders to the very last:\n"
    "Speak plain and true, and let no line be long;\n"
    "Give every lord his title and his due,\n"
    "And every fool the freedom of his tongue.\n"
    "If any ask what thou art not to tell,\n"
    "Then bow and say the matter is not thine.\n"
    "Remember that the house hath heard it all:\n"
    "The same old phrase returning, and returning,\n"
    "While ever newer voices rise above;\n"
    "He that hath kept what once he hath worked out\n"
    "Need never work the same thing out again.\n"
)

_NOTE = (
    "You work in the ticket office of a theatre by the harbour. Answer each question in one short "
    "sentence, politely, and only from this note.\n\n"
    "The house opens at six in the evening and closes at eleven. On Mondays there is no play. "
    "Seats in the front rows cost twelve crowns, those in the gallery five, and children pay half. "
    "Tickets are kept at the desk until a quarter of an hour before the play begins; after that "
    "they are sold to those who wait. A ticket can be given back until noon of the same day, and "
    "the price is paid out in full. Later it can be exchanged for another evening, once.\n\n"
    "Coats and umbrellas are left in the hall on the left. Dogs may not come in, but the baker "
    "across the street looks after them. In the interval there is tea, cider and bread with "
    "cheese; the bar takes coins, not notes. The lift goes to the gallery. Who is late waits in "
    "the hall until the first scene has ended, and is then led to a seat at the side.\n\n"
    "This week the company plays a comedy of errors, in five acts, with music. The part of the "
    "king is played by a new actor from the islands, and the old king has become the fool. Next "
    "week there is a tragedy, for which few seats are left. The company thanks the harbour guild, "
    "which paid for the new curtain, and asks all guests not to sing along.\n\n"
    "A question of a guest. The"
)

_words = re.compile(r"\w+").findall

_VERBS = _words("asks says vows begs sobs hums")
_MOODS = _words(
    "Old Mad Sad Bad Shy Sly Wry Dry Big Fat Fit Odd Ill Low Hot Icy "
    "Raw Red Tan Wan New Our Her His Thy Yon Any Fey Dim Wee Coy Lax"
)
_WHO = _words(
    "King Lord Duke Earl Page Fool Monk Maid Lady Poet Bard Cook Thug Heir Aunt Wife "
    "Lion Wolf Bear Hare Crow Dove Hawk Wren Swan Toad Frog Newt Mole Lamb Goat Boar"
)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of equal length.

    Attributes:
        prompts: Texts, all different.
        system_tokens: Tokens of their common prefix.
        suffix_tokens: Tokens that each adds.
    """

    prompts: list[str]
    system_tokens: int = SYSTEM_TOKENS
    suffix_tokens: int = SUFFIX_TOKENS


MAX_CALLS = len(_VERBS) * len(_MOODS) * len(_WHO)


def calls(count: int) -> list[str]:
    """Return that many different prompts, 528 characters each.

    Args:
        count: At most ``MAX_CALLS``; the first of them are the same for every count.
    """
    assert count <= MAX_CALLS
    endings = islice(product(_VERBS, _MOODS, _WHO), count)
    return [f"{SYSTEM_PROMPT}\n{mood} {who} {verb}: " for verb, mood, who in endings]


def calls_in_words(count: int, tokenize: Callable[[str], list[int]]) -> Calls:
    """Return questions about one note, all of the most common length.

    Args:
        count: At most ``MAX_CALLS``; there may be fewer of one length.
        tokenize: Turns a text into a model's ids.
    """
    endings = [
        f" {mood.lower()} {who.lower()} {verb}: is there a seat left for me?\nThe answer:"
        for verb, mood, who in product(_VERBS, _MOODS, _WHO)
    ]
    lengths = [len(tokenize(ending)) for ending in endings]
    [(usual, _)] = Counter(lengths).most_common(1)
    chosen = [end for end, length in zip(endings, lengths, strict=True) if length == usual]
    prompts = [_NOTE + ending for ending in chosen[:count]]
    return Calls(prompts, len(tokenize(_NOTE)), usual)
