"""The text ends at the first stop string, at any chunk boundary.

The oracle looks at the whole text after each piece. An alphabet of two letters makes stop
strings overlap with each other, with themselves and with every border between pieces.
"""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.engine.text.stop_strings import StopChecker, StopStrings

letters = st.text("ab", max_size=5)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces = st.lists(st.tuples(letters, st.booleans()), max_size=12)


def naive(
    pieces: Sequence[tuple[str, bool]], stops: Sequence[str], include: bool
) -> tuple[str, str | None]:
    """The text that may be shown after these pieces, and the stop string it has reached."""
    text = "".join(piece for piece, _ in pieces)
    counts = [may_stop for piece, may_stop in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and counts[end - 1]:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    if include:
        return text, None
    beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
    held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
    return text[: len(text) - held], None


@given(pieces, stops, st.booleans())
@example([("aab", True), ("ab", True)], ["aabab"], False)
@example([("ab", False), ("a", True), ("b", True)], ["bab"], False)
def test_each_piece_shows_what_the_whole_text_allows(pieces, stops, include):
    """No more, for a stop string may come; no less, for someone is reading along."""
    checker, shown = StopChecker(StopStrings(stops), include), ""

    for number, (piece, may_stop) in enumerate(pieces, start=1):
        shown += checker.append(piece, may_stop)
        assert (shown, checker.matched) == naive(pieces[:number], stops, include)
        if checker.matched:
            return
    assert shown + checker.finish() == "".join(piece for piece, _ in pieces)


@given(st.text("ab"), stops, st.booleans())
def test_the_text_does_not_depend_on_how_it_was_cut(text: str, stops: list[str], include: bool):
    """A model with other tokens ends at the same place."""
    whole, letter_by_letter = (
        StopChecker(StopStrings(stops), include),
        StopChecker(StopStrings(stops), include),
    )
    at_once = whole.append(text)

    shown = ""
    for letter in text:
        shown += letter_by_letter.append(letter)
        if letter_by_letter.matched:
            break

    assert (shown, letter_by_letter.matched) == (at_once, whole.matched)


def test_the_match_that_is_complete_first_counts():
    """Not the one that begins first: when "bc" is there, "d" may still come."""
    checker = StopChecker(StopStrings(["abcd", "bc"]))

    assert checker.append("xabcd") == "xa"
    assert checker.matched == "bc"


def test_of_matches_that_end_together_the_longest_is_cut():
    checker = StopChecker(StopStrings(["\n\n", "User:\n\n"]))

    assert checker.append("Yes.User:\n\n") == "Yes."
    assert checker.matched == "User:\n\n"


def test_what_was_held_back_for_nothing_comes_with_the_next_piece():
    checker = StopChecker(StopStrings(["</answer>"]))

    assert [checker.append(piece) for piece in ("4", "2</", "ans", "wers>")] == [
        "4",
        "2",
        "",
        "</answers>",
    ]
    assert checker.finish() == ""


def test_an_included_stop_string_stays_at_the_end_and_nothing_waits_for_it():
    checker = StopChecker(StopStrings(["END"]), include=True)

    assert [checker.append(piece) for piece in ("the E", "N", "D of it")] == ["the E", "N", "D"]
    assert checker.matched == "END"


def test_a_stop_string_below_min_tokens_does_not_count_later_either():
    """It ended in text that could not stop; the next one ends in text that can."""
    checker = StopChecker(StopStrings(["##"]))

    assert checker.append("a##b", may_stop=False) == "a##b"
    assert checker.append("c", may_stop=True) == "c"
    assert checker.append("d##") == "d"
    assert checker.matched == "##"


def test_a_stop_string_that_begins_below_min_tokens_and_ends_above_counts():
    checker = StopChecker(StopStrings(["##"]))

    assert checker.append("a#", may_stop=False) == "a"
    assert checker.append("#b", may_stop=True) == ""
    assert checker.matched == "##"


def test_without_stop_strings_everything_passes():
    checker = StopChecker(StopStrings([]))

    assert checker.append("any text") + checker.finish() == "any text"
    assert checker.matched is None


def test_characters_of_several_code_points_are_matched_like_any_text():
    """A family of four in pieces: the stop string is its third member."""
    checker = StopChecker(StopStrings(["👧"]))

    assert checker.append("👩\u200d👩") == "👩\u200d👩"
    assert checker.append("\u200d👧\u200d👦") == "\u200d"


def test_text_after_the_end_is_our_own_mistake():
    checker = StopChecker(StopStrings(["."]))
    checker.append("Done.")

    with pytest.raises(AssertionError, match="ended"):
        checker.append("More.")


def test_an_empty_stop_string_is_our_own_mistake():
    """Sampling parameters refuse it; here it would end every text at once."""
    with pytest.raises(AssertionError, match="empty"):
        StopChecker(StopStrings(["a", ""]))


class CountedText(str):
    """Text that counts how often one of its characters is read."""

    reads = 0

    def __getitem__(self, key: object) -> str:
        CountedText.reads += 1
        return super().__getitem__(key)  # type: ignore[index]


def test_the_worst_text_costs_three_looks_per_character():
    """Half a stop string again and again, which a naive search would read from its start."""
    checker = StopChecker(StopStrings([CountedText("a" * 500 + "b")]))
    CountedText.reads = 0

    for _ in range(100):
        checker.append("a" * 100)

    assert CountedText.reads <= 3 * 100 * 100
