"""The calls of the demo: a system prompt of 512 tokens, then 16 unique tokens.

A token of the bundled model is a character. Other models get questions in words about a note of
one page, counted in their own tokens.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product

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


MOST_CALLS = len(_VERBS) * len(_MOODS) * len(_WHO)


def calls(count: int) -> list[str]:
    """Return that many different prompts, 528 characters each.

    Args:
        count: At most ``MOST_CALLS``; the first of them are the same for every count.
    """
    assert count <= MOST_CALLS
    endings = islice(product(_VERBS, _MOODS, _WHO), count)
    return [f"{SYSTEM_PROMPT}\n{mood} {who} {verb}: " for verb, mood, who in endings]


def calls_in_words(count: int, tokenize: Callable[[str], list[int]]) -> Calls:
    """Return questions about one note, all of the most common length.

    Args:
        count: At most ``MOST_CALLS``; there may be fewer of one length.
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
