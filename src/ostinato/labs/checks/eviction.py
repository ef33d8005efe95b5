"""Checks of lab 3: who is held, who goes first, and who never goes."""

from typing import Any

from ostinato.labs.mistakes import CheckList, Mistake, Story, expect_list

CHECKS = CheckList()


def _names(blocks: Any) -> str:
    return " ".join(block.name for block in blocks) or "none"


def _chain(lab: Any, text: str) -> list[Any]:
    """Cache a prefix: a block per letter, each behind the one before."""
    blocks: list[Any] = []
    for letter in text:
        blocks.append(lab.Block(letter, blocks[-1] if blocks else None))
    return blocks


def _leaves(lab: Any, text: str) -> list[Any]:
    """Cache blocks that have nothing to do with each other."""
    return [lab.Block(letter) for letter in text]


@CHECKS.add("A queue of what was released", 1, 2, 3)
def check_queue(lab: Any, story: Story) -> None:
    """Released longest ago goes first; used again goes to the end."""
    policy, (a, b, c) = lab.Policy(), _leaves(lab, "ABC")
    for block in (a, b, c):
        story.append(f"add({block.name})")
        policy.add([block])
    _expect_victim(policy, story, a, "A")
    story += ["remove(A)", "add(A)"]
    policy.remove([a])
    _expect_victim(policy, story, b, "B")
    policy.add([a])
    _expect_victim(policy, story, b, "B")


def _expect_victim(policy: Any, story: Story, right: Any, name: str) -> None:
    before = list(policy.queue)
    victim = policy.victim()
    if list(policy.queue) != before:
        what = "victim changes the queue: it has to name the victim, no more."
        raise Mistake("victim-has-effects", what, [*story, "victim()"])
    if victim is right:
        return
    shown = "None" if victim is None else getattr(victim, "name", repr(victim))
    picture = [*story, f"victim()  ->  {shown}, not {name}"]
    if victim is None:
        raise Mistake("no-victim", "There is something to evict, and victim returns None.", picture)
    if victim not in before:
        what = "The victim is not in the queue any more: a request holds it."
        raise Mistake("victim-is-held", what, picture, "Its KV is being read at this moment.")
    if name == "B" and victim.name == "A":
        what = "A block that was used again keeps its old place: that is first in, first out."
        raise Mistake("first-in-first-out", what, picture)
    if victim is before[-1]:
        what = "The block that was released last goes first."
        raise Mistake("most-recently-used", what, picture, "It is the likeliest to be used again.")
    raise Mistake("wrong-victim", "Another block than the one released longest ago.", picture)


@CHECKS.add("Leaves first", 1, 2, 3)
def check_leaves(lab: Any, story: Story) -> None:
    """Law 8: a block's ancestors are cached as long as it is."""
    policy, (a, b, c) = lab.Policy(), _chain(lab, "ABC")
    story.append("A <- B <- C cached, add(A B C), root first")
    policy.add([a, b, c])
    victim = policy.victim()
    if victim is not c:
        shown = "None" if victim is None else victim.name
        raise Mistake(
            "root-before-leaf", "The victim is continued by a cached block.",
            [*story, f"victim()  ->  {shown}, not C"],
            "What follows an evicted block can never be found again, and still takes memory.",
        )  # fmt: skip
    if lab.Policy().victim() is not None:
        raise Mistake("wrong-victim", "An empty policy names a victim.")


@CHECKS.add("Holding", 1, 2, 4)
def check_hold(lab: Any, story: Story) -> None:
    """Each block of the path has one more holder, and none of them can be evicted."""
    policy, path = lab.Policy(), _chain(lab, "AB")
    policy.add(path[::-1])
    for holders in (1, 2):
        story.append("hold(A B)")
        lab.hold(path, policy)
        counts = [block.ref_count for block in path]
        picture = [*story, f"holders of A and B: {counts}, idle: {_names(policy.queue)}"]
        if counts != [holders] * 2:
            what = "Not every block of the path has one holder more."
            raise Mistake(
                "holder-not-counted", what, picture, "Holding a block is holding its prefix."
            )
        if policy.queue:
            what = "A block that a request holds is still evictable."
            raise Mistake("held-stays-evictable", what, picture)


@CHECKS.add("Releasing", 1, 2, 4, 5)
def check_release(lab: Any, story: Story) -> None:
    """Tail first, and only what no other request holds."""
    policy, path = lab.Policy(), _chain(lab, "ABC")
    policy.add(path[::-1])
    story += ["hold(A B C)", "hold(A B)", "release(A B C)"]
    lab.hold(path, policy)
    lab.hold(path[:2], policy)
    lab.release(path, policy)
    counts = [block.ref_count for block in path]
    picture = [*story, f"holders of A, B, C: {counts}, idle: {_names(policy.queue)}"]
    if counts != [1, 1, 0]:
        raise Mistake("release-miscounts", "Each block has to have one holder less.", picture)
    if list(policy.queue) == path[::-1]:
        what = "A block that another request holds becomes evictable."
        raise Mistake("held-becomes-evictable", what, picture)
    if list(policy.queue) != path[2:]:
        what = "What no request holds has to be in the policy, and nothing else."
        raise Mistake(
            "idle-is-forgotten", what, picture, "A block in no list is lost: a leak (law 9)."
        )
    lab.release(path[:2], policy)
    story.append("release(A B)")
    if list(policy.queue) != path[::-1]:
        raise Mistake(
            "released-root-first", "The root is released before its tail.",
            [*story, f"idle: {_names(policy.queue)}, not C B A"],
            "The queue begins with a block that cannot go; each search has to pass it.",
        )  # fmt: skip
    _check_refusal(lab, policy, path, story)


def _check_refusal(lab: Any, policy: Any, path: list[Any], story: Story) -> None:
    """Releasing twice is refused, and changes nothing."""
    lab.hold(path[:1], policy)
    story += ["hold(A)", "release(A B)"]
    refused = False
    try:
        lab.release(path[:2], policy)
    except ValueError:
        refused = True
    counts = [block.ref_count for block in path]
    picture = [*story, f"holders of A, B, C: {counts}, not [1, 0, 0]"]
    if not refused:
        what = "A block that is not held is released, without a ValueError."
        raise Mistake("released-twice", what, picture, "Counts below zero free what others read.")
    if counts != [1, 0, 0] or path[0] in policy.queue:
        what = "A refused release has changed something."
        raise Mistake("refusal-has-effects", what, picture)


@CHECKS.add("Room: all or nothing", 1, 2, 3, 6)
def check_room(lab: Any, story: Story) -> None:
    """Victims in order; law 6 where there are too few."""
    policy, (a, b, c), (x,) = lab.Policy(), _chain(lab, "ABC"), _leaves(lab, "X")
    policy.add([c, b, a, x])
    story += ["A <- B <- C and X are idle, released in the order C B A X", "make_room(5)"]
    evicted = expect_list(lab.make_room(5, policy), lab.Block, "make_room(5, policy)")
    idle = [block.name for block in policy.queue]
    if evicted or idle != list("CBAX"):
        raise Mistake(
            "half-a-refusal", "There is no room for five, and blocks are evicted all the same.",
            [*story, f"->  {_names(evicted)}, idle: {' '.join(idle)}"],
            "What does not fit changes nothing (law 6): the request waits, the cache stays.",
        )  # fmt: skip
    story[-1] = "make_room(3)"
    evicted = lab.make_room(3, policy)
    picture = [*story, f"->  {_names(evicted)}, not C B A", f"idle: {_names(policy.queue)}"]
    if [block.name for block in evicted] == ["C", "X"] or evicted[1:2] == [x]:
        what = "After C is evicted B is a leaf, but its num_children still counts C."
        raise Mistake("parent-keeps-its-child", what, picture)
    if len(evicted) != 3:
        raise Mistake("wrong-number-evicted", f"{len(evicted)} blocks are evicted, not 3.", picture)
    if any(block in policy.queue for block in evicted):
        what = "An evicted block is still in the policy."
        raise Mistake("evicted-stays-evictable", what, picture, "It would be evicted twice.")
    if evicted != [c, b, a]:
        raise Mistake("wrong-order", "Blocks are evicted in another order.", picture)
