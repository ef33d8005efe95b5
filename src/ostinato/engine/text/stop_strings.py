r"""Finds stop strings in text that arrives in pieces.

A stop string may begin in one piece and end several later, so text that may still become one is
held back::

    stop "\n\n"     arrives "Yes.\n"     shown "Yes."     held back "\n"
                    arrives "\nNo"       matched: the text is "Yes."

**Which match counts** does not depend on how the text was cut into pieces: the one whose last
character comes first; of several that end together, the longest.

For each stop string we know how much of its beginning the text now ends with (Knuth, Morris,
Pratt 1977), so that no character is looked at twice. What depends on the strings alone is shared
by all outputs of a request; an output only notes which strings have begun, mostly none.
"""

from array import array
from collections.abc import Sequence


class StopStrings:
    """Some stop strings, prepared for any number of outputs.

    Attributes:
        texts: The strings, the longest first: it wins if several end with the same character.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Prepare strings, none of them empty; there may be none at all."""
        assert all(stop), "an empty stop string would match everywhere"
        self.texts = sorted(set(stop), key=len, reverse=True)
        self._borders = [array("I", _borders(text)) for text in self.texts]
        self._by_first: dict[str, list[int]] = {}
        for index, text in enumerate(self.texts):
            self._by_first.setdefault(text[0], []).append(index)

    def step(self, begun: dict[int, int], character: str) -> tuple[dict[int, int], int | None]:
        """Add the text's next character.

        Args:
            begun: By string, how much of its beginning the text ends with, if anything.
            character: What comes next.

        Returns:
            The same with the character, and the first string that the text now ends with.
        """
        candidates = self._by_first.get(character, ())
        if not begun and not candidates:
            return begun, None
        reached, match = dict[int, int](), None
        for index in {*begun, *candidates}:
            text, borders = self.texts[index], self._borders[index]
            size = begun.get(index, 0)
            while size and text[size] != character:
                size = borders[size]
            size += text[size] == character
            if size == len(text):
                match = index if match is None else min(match, index)
                size = borders[size]
            if size:
                reached[index] = size
        return reached, match


class StopChecker:
    """One output's text on its way to the caller, up to the first stop string."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        """Start with no text.

        Args:
            stops: Strings that end the text.
            include: Keep the stop string at the end of the text. Nothing is held back then.
        """
        self.matched: str | None = None  # the stop string that the text has reached
        self._stops = stops
        self._include = include
        self._held = ""
        self._begun: dict[int, int] = {}

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

        Cost: O(len(text)) for each stop string that has begun, amortised.
        """
        assert self.matched is None, "the text has ended"
        waiting = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            self._begun, match = self._stops.step(self._begun, character)
            if match is not None and may_stop:
                self.matched, self._held = self._stops.texts[match], ""
                return waiting[: place if self._include else place - len(self.matched)]
        longest = 0 if self._include else max(self._begun.values(), default=0)
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
