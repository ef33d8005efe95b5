"""Checks of lab 1: names of blocks, and an index that finds them."""

from typing import Any

from ostinato.labs.mistakes import (
    BLOCK,
    CheckList,
    Mistake,
    Story,
    expect_list,
    expect_match,
    expect_type,
    spaced,
    texts,
    tokens,
)
from ostinato.observe.prompt_diff import num_alike

CHECKS = CheckList()


@CHECKS.add("One token is always computed", 1)
def check_usable(lab: Any, story: Story) -> None:
    """Law 4, in whole blocks."""
    for size in (1, 2, 4):
        for num_tokens in range(1, 10):
            call = f"usable_tokens({num_tokens}, {size})"
            story.append(call)
            usable = expect_type(lab.usable_tokens(num_tokens, size), int, call)
            right = (num_tokens - 1) // size * size
            if usable == right:
                continue
            picture = [f"{call}  ->  {usable}", f"{'':{len(call)}}  not {right}"]
            why = "Without a query there is no next token: n tokens hit at most n - 1."
            if usable >= num_tokens:
                raise Mistake("hits-all-tokens", "All tokens of a prompt may hit.", picture, why)
            if usable % size:
                raise Mistake("half-a-block", "A part of a block counts as a hit.", picture)
            raise Mistake("wrong-number", "The number of usable tokens is wrong.", picture)


@CHECKS.add("A name is a digest", 2)
def check_digest_type(lab: Any, story: Story) -> None:
    """Bytes, the same for equal tokens in a list and a tuple."""
    story.append("block_digest(ROOT, [65, 66])")
    digest = lab.block_digest(lab.ROOT, [65, 66])
    expect_type(digest, bytes, "block_digest(ROOT, [65, 66])")
    if lab.block_digest(lab.ROOT, [65, 66]) != digest:
        raise Mistake("not-repeatable", "The same block gets another name the second time.")
    if lab.block_digest(lab.ROOT, (65, 66)) != digest:
        raise Mistake(
            "hashes-the-container",
            "A list and a tuple of equal tokens have different names.",
            [_digest(lab, [65, 66]), _digest(lab, (65, 66))],
            "str([1, 2]) and str((1, 2)) differ: pack the numbers, do not print them.",
        )
    if len(digest) < 16:
        what = f"A name has {len(digest)} bytes."
        why = "Names of fewer than 16 bytes collide by chance."
        raise Mistake("short-digest", what, [digest.hex()], why)


@CHECKS.add("Names cover the tokens, and their order and size", 2)
def check_digest_tokens(lab: Any, story: Story) -> None:
    """Two different blocks never have one name."""
    pairs = [
        ([65, 66], [66, 65], "order-ignored", "The order of tokens does not matter for a name."),
        ([1, 12], [11, 2], "tokens-run-together", "Two runs of digits give one name."),
        ([0x141, 66], [0x241, 66], "tokens-cut-short", "Tokens that share a low byte are one."),
        ([65, 66], [65, 67], "last-token-ignored", "The last token does not matter for a name."),
        ([65, 66], [67, 66], "first-token-ignored", "The first token does not matter for a name."),
    ]
    for one, other, kind, what in pairs:
        story.append(f"block_digest(ROOT, {one}), block_digest(ROOT, {other})")
        if lab.block_digest(lab.ROOT, one) == lab.block_digest(lab.ROOT, other):
            picture = [_digest(lab, one), _digest(lab, other)]
            raise Mistake(kind, what, picture, "Then one block's KV is served for another's text.")


@CHECKS.add("Names cover the parent", 2)
def check_digest_parent(lab: Any, story: Story) -> None:
    """Law 3: equal tokens behind different prefixes are different content."""
    other = lab.block_digest(lab.ROOT, tokens("XB"))
    story.append("block_digest(XB, EF)")
    if lab.block_digest(lab.ROOT, tokens("EF")) == lab.block_digest(other, tokens("EF")):
        raise Mistake(
            "parent-ignored",
            "A block has the same name whatever comes before it.",
            ["AB EF    EF is found here", "XB EF    and served here: its KV saw an A"],
            "KV depends on all tokens before; a digest of the tokens alone serves wrong KV.",
        )


@CHECKS.add("The chain has a digest per full block", 3)
def check_chain(lab: Any, story: Story) -> None:
    """Each digest continues the one before."""
    index = lab.HashIndex(BLOCK)
    for text in texts(6, shortest=0):
        story[:] = [f"HashIndex({BLOCK}).chain({spaced(text)})"]
        chain = expect_list(index.chain(tokens(text)), bytes, story[0])
        full = len(text) // BLOCK
        picture = [f"tokens     {spaced(text)}", f"digests    {len(chain)}, not {full}"]
        if len(chain) > full:
            raise Mistake("partial-block-hashed", "A block that is not full has a digest.", picture)
        if len(chain) < full:
            raise Mistake("block-forgotten", "A full block has no digest.", picture)
    chains = {text: tuple(index.chain(tokens(text))) for text in texts(6, shortest=6)}
    for text, chain in chains.items():
        for other, others in chains.items():
            _compare_chains(text, chain, other, others)


def _compare_chains(
    text: str, chain: tuple[bytes, ...], other: str, others: tuple[bytes, ...]
) -> None:
    """Require equal digests exactly as far as two texts begin with equal blocks."""
    common = num_alike(text, other) // BLOCK
    for place in range(len(chain)):
        end = (place + 1) * BLOCK
        if place >= common and chain[place] == others[place]:
            raise Mistake(
                "chain-is-broken",
                f"Block {place} has one name behind different prefixes: its parent is not the "
                "block before it.",
                [f"{spaced(text[:end])}    {chain[place].hex()[:12]}",
                 f"{spaced(other[:end])}    {others[place].hex()[:12]}"],
                "Every block has to be named under the digest of the block before it.",
            )  # fmt: skip
        if place < common and chain[place] != others[place]:
            what = "Equal prefixes have different names."
            raise Mistake("name-depends-on-what-follows", what, [spaced(text), spaced(other)])


@CHECKS.add("A look-up changes nothing", 4, 5)
def check_no_effects(lab: Any, story: Story) -> None:
    """Rule 4 of the cache."""
    index = lab.HashIndex(BLOCK)
    _insert(index, story, "ABCD", [7, 8])
    before = dict(index.blocks)
    index.match(tokens("ABXYZW"))
    if index.blocks != before:
        story.append("match(AB XY ZW) adds or removes a digest")
        raise Mistake("match-has-effects", "A look-up changes the index.", story)


@CHECKS.add("What is inserted is found", 4, 5)
def check_match(lab: Any, story: Story) -> None:
    """All pairs of short prompts, against a dictionary of all prefixes."""
    for first in (*texts(4, shortest=2), "ABABAB", "ABBBAA"):
        index = lab.HashIndex(BLOCK)
        blocks = list(range(len(first) // BLOCK))
        held = _insert(index, story, first, blocks)
        if held != blocks:
            what = "insert into an empty index returns other blocks than it was given."
            raise Mistake("insert-returns-wrong", what, [*story, f"->  {held}, not {blocks}"])
        cached = {first[: (at + 1) * BLOCK]: at for at in blocks}
        for text in texts(6):
            expect_match(index, text, cached, story[-1:])


@CHECKS.add("A walk stops at the first miss", 4, 5, 6)
def check_gap(lab: Any, story: Story) -> None:
    """A block behind one that is gone cannot be used."""
    index = lab.HashIndex(BLOCK)
    _insert(index, story, "ABCDEF", [7, 8, 9])
    digest = index.chain(tokens("ABCD"))[-1]
    index.blocks.pop(digest, None)
    match = index.match(tokens("ABCDEF"))
    story.append(f"CD is gone; match(AB CD EF)  ->  {match}")
    if match != [7]:
        raise Mistake(
            "match-goes-on-after-a-miss", "match skips a block that is missing and goes on.",
            story, "KV of EF is of no use without that of CD.",
        )  # fmt: skip


@CHECKS.add("The older block stays", 5)
def check_duplicates(lab: Any, story: Story) -> None:
    """Two requests that computed the same at once: the older block serves both."""
    index = lab.HashIndex(BLOCK)
    _insert(index, story, "ABCD", [7, 8])
    held = _insert(index, story, "ABEF", [1, 2])
    now = [index.blocks.get(digest) for digest in index.chain(tokens("ABEF"))]
    if now != [7, 2]:
        story.append(f"AB EF is now in blocks {now}, not [7, 2]")
        raise Mistake(
            "newer-block-replaces", "The second block of known content replaces the first.",
            story, "Requests that hold block 7 go on reading it, and it would be found by none.",
        )  # fmt: skip
    if held != [7, 2]:
        raise Mistake(
            "insert-returns-own-blocks", "insert returns the blocks that it was given.",
            [*story, f"->  {held}, not [7, 2]"],
            "The caller has to learn that AB is in block 7, or it keeps a copy for ever.",
        )  # fmt: skip


@CHECKS.add("The last block is forgotten, and no other", 5, 6)
def check_remove(lab: Any, story: Story) -> None:
    """Eviction takes tails (law 8)."""
    index = lab.HashIndex(BLOCK)
    _insert(index, story, "ABCDEF", [7, 8, 9])
    story.append("remove(AB CD EF)")
    index.remove(tokens("ABCDEF"))
    match = index.match(tokens("ABCDEF"))
    story.append(f"match(AB CD EF)  ->  {match}, not [7, 8]")
    if match == [7, 8, 9]:
        what = "remove forgets nothing: an evicted block is still found."
        raise Mistake("remove-forgets-nothing", what, story, "Its KV is overwritten by another's.")
    if match != [7, 8]:
        what = "remove forgets another block than the last."
        raise Mistake("remove-takes-the-wrong-block", what, story)


def _insert(index: Any, story: Story, text: str, blocks: list[int]) -> list[int]:
    full = text[: len(blocks) * BLOCK]
    story.append(f"insert({spaced(full)}, {blocks})")
    held = expect_list(index.insert(tokens(full), blocks[:]), int, story[-1])
    return list(held)


def _digest(lab: Any, ids: Any) -> str:
    digest: bytes = lab.block_digest(lab.ROOT, ids)
    return f"block_digest(ROOT, {ids})  ->  {digest.hex()[:16]}"
