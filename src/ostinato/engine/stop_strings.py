r"""Finds stop strings in text that arrives in pieces.

A stop string may begin in one piece and end several later, so text that may still become one is
held back::

    stop "\n\n"     arrives "Yes.\n"     shown "Yes."     held back "\n"
                    arrives "\nNo"       matched: the text is "Yes."

**Which match counts** does not depend on how the text was cut into pieces: the one whose last
character comes first; of several that end together, the longest.

For each stop string we know how much of its beginning the text now ends with (Knuth, Morris,
Pratt 1977), so that no character is looked at twice. One automaton for all strings together (Aho,
Corasick 1975) would pay off from dozens on; requests have a handful.
"""

from collections.abc import Sequence


class _Needle:
    """One stop string, and how much of its beginning the text ends with."""

    __slots__ = ("_borders", "num_reached", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_reached = 0
        self._borders = _borders(text)

    def step(self, character: str) -> bool:
        """Add the text's next character; True if the text now ends with the whole string."""
        reached = self.num_reached
        while reached and self.text[reached] != character:
            reached = self._borders[reached]
        reached += self.text[reached] == character
        whole = reached == len(self.text)
        self.num_reached = self._borders[reached] if whole else reached
        return whole


class StopChecker:
    """One output's text on its way to the caller, up to the first stop string."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        """Start with no text.

        Args:
            stop: Strings that end the text, none of them empty; there may be none at all.
            include: Keep the stop string at the end of the text. Nothing is held back then.
        """
        assert all(stop), "an empty stop string would match everywhere"
        self.matched: str | None = None  # the stop string that the text has reached
        self._include = include
        self._held = ""
        # The longest first: it wins if several end with the same character.
        self._needles = [_Needle(text) for text in sorted(set(stop), key=len, reverse=True)]

    def append(self, text: str, may_stop: bool = True) -> str:
        """Add text and return what may be shown now.

        Args:
            text: The next piece; none may follow a match.
            may_stop: False for text below ``min_tokens``. A stop string that ends in such text
                does not count, neither now nor later; one that begins there and ends in text that
                may stop does.

        Returns:
            Text that is certain to be part of the output. With the one that completes a match, up
            to the match, or to its end if that is included.

        Cost: O(len(text)) for each stop string, amortised; none without stop strings.
        """
        assert self.matched is None, "the text has ended"
        if not self._needles:
            return text
        waiting = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            found = [needle.text for needle in self._needles if needle.step(character)]
            if found and may_stop:
                self.matched, self._held = found[0], ""
                return waiting[: place if self._include else place - len(found[0])]
        longest = 0 if self._include else max(needle.num_reached for needle in self._needles)
        split = len(waiting) - longest
        self._held = waiting[split:]
        return waiting[:split]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the output."""
        rest, self._held = self._held, ""
        return rest


def _borders(text: str) -> list[int]:
    """Return, for each length, the longest proper prefix that also ends the prefix of that length.

    Shape (len(text) + 1,); the first two are 0.
    """
    borders = [0, 0]
    for end in range(1, len(text)):
        border = borders[end]
        while border and text[border] != text[end]:
            border = borders[border]
        borders.append(border + (text[border] == text[end]))
    return borders
