"""Checks of lab 4: tokens of a block, sealed tails, and copies."""

from typing import Any

from ostinato.labs.mistakes import (
    CheckList,
    Mistake,
    Story,
    expect_type,
    spaced,
    texts,
    tokens,
)
from ostinato.observe.prompt_diff import num_alike

CHECKS = CheckList()

SIZE = 4


@CHECKS.add("Tokens in common", 1)
def check_common(lab: Any, story: Story) -> None:
    """From the first token on, and no further than they agree."""
    for one in texts(3, shortest=0):
        for other in texts(3, shortest=0):
            call = story.begin(f"num_common({one or '(none)'}, {other or '(none)'})")
            count = expect_type(lab.num_common(tokens(one), tokens(other)), int, call)
            right = num_alike(one, other)
            if count == right:
                continue
            picture = [f"{call}  ->  {count}, not {right}"]
            if count > right:
                what = "Tokens behind the first difference count."
                why = "Their KV depends on the token that differs."
                raise Mistake("counts-behind-a-difference", what, picture, why)
            raise Mistake("counts-too-few", "A leading token that agrees does not count.", picture)


def _index(lab: Any, story: Story, *prompts: tuple[str, list[int]]) -> Any:
    """Return an index with prompts in it, whole blocks only."""
    index = lab.Index(SIZE)
    for text, blocks in prompts:
        story.append(f"insert({spaced(text, SIZE)}, {blocks})")
        index.insert(tokens(text), blocks)
    return index


@CHECKS.add("Siblings", 2)
def check_siblings(lab: Any, story: Story) -> None:
    """What is cached behind exactly these tokens."""
    index = _index(lab, story, ("ABCDEFGH", [7, 8]), ("XBCDIJKL", [1, 2]), ("ABCDMNOP", [7, 3]))
    index.blocks[tuple(tokens("ABCDQR"))] = 4
    story.append("and a tail that is not full: QR behind ABCD, in block 4")
    for before, right in (("ABCD", {8: "EFGH", 3: "MNOP", 4: "QR"}), ("", {7: "ABCD", 1: "XBCD"})):
        call = f"siblings({before})"
        answer = expect_type(index.siblings(tokens(before)), list, call)
        shown = {block: "".join(map(chr, own)) for own, block in answer}
        picture = [*story, f"{call}  ->  {shown or 'none'}", f"not {right}"]
        if 2 in shown and before:
            what = "A block behind another prefix is a sibling."
            raise Mistake("sibling-of-another-prefix", what, picture, "XBCD is not ABCD (law 3).")
        if any(len(own) > SIZE for own in shown.values()):
            raise Mistake("grandchildren-too", "What is two blocks on counts too.", picture)
        if 4 not in shown and before:
            raise Mistake("sealed-tail-missed", "A block that is not full is no sibling.", picture)
        if shown != right:
            raise Mistake("siblings-wrong", "The siblings are not those that are cached.", picture)


@CHECKS.add("The tail that agrees longest", 1, 2, 3)
def check_tail(lab: Any, story: Story) -> None:
    """Of all siblings, whatever their order; none without a token."""
    index = _index(lab, story, ("ABCDEXXX", [7, 8]), ("ABCDEFXX", [7, 9]), ("ABCDEFGX", [7, 3]),
                   ("ABCDEYYY", [7, 5]))  # fmt: skip
    rights = {"ABCDEFGH": (3, 3), "ABCDEFZZ": (9, 2), "ABCDZ": None, "ABCDEFGHIJ": (3, 3),
              "ABZ": (7, 2), "ZZ": None, "ABCD": None, "ABCDEF": (9, 2)}  # fmt: skip
    for text, right in rights.items():
        call = f"tail({spaced(text, SIZE)})"
        answer = index.tail(tokens(text))
        picture = [*story, f"{call}  ->  {answer}", f"not {right}"]
        if answer is None and right is None:
            continue
        expect_type(answer, (tuple, type(None)), call, "a block and a number, or None")
        if answer is not None and answer[1] == 0:
            what = "A tail of no tokens: there is nothing to copy, so return None."
            raise Mistake("tail-of-nothing", what, picture)
        if answer is None:
            raise Mistake("tail-missed", "A block whose first tokens agree is missed.", picture)
        if right is None or (answer[1] > max(right[1], 1) and answer[0] == right[0]):
            what = "More tokens than agree would be copied."
            raise Mistake("tail-too-long", what, picture)
        if answer[1] < right[1]:
            what = "Another sibling agrees in more tokens."
            raise Mistake("not-the-longest-tail", what, picture, "What is not copied is computed.")
        if answer[1] != right[1]:
            raise Mistake("tail-too-long", "More tokens than agree would be copied.", picture)


@CHECKS.add("Sealed tails", 1, 2, 3, 4)
def check_seal(lab: Any, story: Story) -> None:
    """Taken unless a sibling begins with the same; never found as a whole block."""
    index = _index(lab, story, ("ABCDEFGH", [7, 8]))
    for text, block, right in (
        ("ABCDEF", 4, False), ("ABCDUV", 5, True), ("ABCDUV", 6, False), ("ABCDU", 2, False),
        ("ABCDUVW", 3, True), ("AB", 1, False), ("XY", 9, True),
    ):  # fmt: skip
        call = f"seal({spaced(text, SIZE)}, {block})"
        taken = index.seal(tokens(text), block)
        story.append(f"{call}  ->  {taken}")
        expect_type(taken, bool, call)
        if taken and not right:
            what = "A tail is taken although a sibling begins with the same tokens."
            why = "The same content twice takes memory and finds nothing more."
            raise Mistake("sealed-twice", what, [*story, f"not {right}"], why)
        if right and not taken:
            what = "A tail is refused that no sibling begins with."
            raise Mistake("seal-refuses-too-much", what, [*story, f"not {right}"])
        if taken and index.blocks.get(tuple(tokens(text))) != block:
            what = "A tail that was taken is not kept under its tokens."
            raise Mistake("sealed-and-lost", what, story)
    answers = index.match(tokens("ABCDUVWX")), index.tail(tokens("ABCDUVWX"))
    if answers != ([7], (3, 3)):
        what = "After sealing, ABCD has to be found whole and UVW as the tail."
        raise Mistake("sealed-and-lost", what, [*story, f"match, tail of ABCD UVWX: {answers}"])


@CHECKS.add("Slots", 5)
def check_slots(lab: Any, story: Story) -> None:
    """Where a block's tokens are."""
    for source, target, count in ((2, 5, 1), (2, 5, 3), (0, 1, 2), (3, 1, 0)):
        call = story.begin(f"copy_slots({source}, {target}, {count}, {SIZE})")
        pairs = expect_type(lab.copy_slots(source, target, count, SIZE), list, call)
        right = [(source * SIZE + at, target * SIZE + at) for at in range(count)]
        pairs = [tuple(pair) for pair in pairs]
        if pairs == right:
            continue
        picture = [f"{call}  ->", f"  {pairs}", f"not {right}"]
        if pairs == [(b, a) for a, b in right]:
            why = "The cached block would be overwritten, under all who read it."
            raise Mistake("copied-backwards", "Source and target are exchanged.", picture, why)
        if len(pairs) > len(right):
            what = "More than the tokens that agree is copied."
            raise Mistake("whole-block-copied", what, picture)
        if pairs and pairs[0] == (source, target):
            what = "Block numbers are taken for slots: a block has several."
            raise Mistake("blocks-for-slots", what, picture)
        raise Mistake("wrong-slots", "Other slots are copied.", picture)


@CHECKS.add("Copy on write", 6)
def check_write(lab: Any, story: Story) -> None:
    """In place with one holder; a block of one's own with several; refused without one."""
    _check_alone(lab)
    table, counts, free = [7, 8], {7: 2, 8: 3}, [4, 9]
    story += ["table 7 8, holders of 7 and 8: 2 and 3, free: 4 9", "writable(table, 1)"]
    copied = lab.writable(table, 1, counts, free)
    state = f"table {table}, holders {counts}, free {free}"
    picture = [*story, f"->  {copied}, {state}", "not True, table [7, 9], holders of 8: 2, of 9: 1"]
    if not copied and table == [7, 8]:
        why = "A sequence that shares the block reads another one's tokens (law 3)."
        raise Mistake(
            "writes-what-others-read", "A shared block is written in place.", picture, why
        )
    if table == [7, 8]:
        raise Mistake("table-not-changed", "The table still names the shared block.", picture)
    if counts.get(8) == 3:
        what = "The shared block is still counted as held by this sequence."
        raise Mistake("keeps-its-old-hold", what, picture, "It never becomes free: a leak (law 9).")
    if counts.get(table[1]) != 1:
        raise Mistake("own-block-not-held", "The new block is not counted as held.", picture)
    if table[1] in free:
        raise Mistake("stays-free", "The new block is still free: it is given away twice.", picture)
    if (copied, table, counts[8]) != (True, [7, 9], 2):
        raise Mistake("wrong-copy", "The tables or counts are not right.", picture)
    _check_full(lab)


def _check_alone(lab: Any) -> None:
    table, counts, free = [7, 8], {7: 2, 8: 1}, [9]
    copied = lab.writable(table, 1, counts, free)
    picture = ["table 7 8, one holder of 8", f"writable(table, 1)  ->  {copied}, table {table}"]
    if copied or table != [7, 8] or free != [9]:
        what = "A block without another holder is copied."
        raise Mistake("copies-its-own-block", what, picture, "A block and a copy for nothing.")


def _check_full(lab: Any) -> None:
    table, counts, free = [7], {7: 2}, list[int]()
    refused = False
    try:
        lab.writable(table, 0, counts, free)
    except (MemoryError, IndexError) as error:
        refused = isinstance(error, MemoryError)
    picture = ["table 7, two holders, nothing free", f"writable(table, 0): {table}, {counts}"]
    if (table, counts) != ([7], {7: 2}):
        what = "Without a free block something has changed all the same."
        raise Mistake("refusal-has-effects", what, picture, "Law 6: all or nothing.")
    if not refused:
        what = "Without a free block a MemoryError has to be raised."
        raise Mistake("not-refused", what, picture)
