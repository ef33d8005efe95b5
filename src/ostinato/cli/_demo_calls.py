"""Which calls does the demo make?

An API's day in miniature: one system prompt of 512 characters, which are 512 tokens to the
embedded model, and after it 16 characters that no other call has.
"""

import re
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

MOST_CALLS = len(_VERBS) * len(_MOODS) * len(_WHO)


def calls(count: int) -> list[str]:
    """Return that many different prompts, 528 characters each.

    Args:
        count: At most ``MOST_CALLS``; the first of them are the same for every count.
    """
    assert count <= MOST_CALLS
    endings = islice(product(_VERBS, _MOODS, _WHO), count)
    return [f"{SYSTEM_PROMPT}\n{mood} {who} {verb}: " for verb, mood, who in endings]
