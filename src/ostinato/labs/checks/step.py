"""Checks of lab 5: what a step computes, by hand and for all small steps."""

from itertools import product
from typing import Any

from ostinato.labs.mistakes import CheckList, Mistake, Story, expect_type

CHECKS = CheckList()


def _drawn(step: Any) -> list[str]:
    """Draw a step before it is planned."""
    lines = [
        f"budget {step.budget}, max_chunk {step.max_chunk}, max_running {step.max_running}, "
        f"block_size {step.block_size}, free {step.free_blocks}"
    ]
    for kind in ("running", "waiting"):
        for one in getattr(step, kind):
            lines.append(
                f"{kind} {one.name}: {one.num_computed} of {one.num_tokens} tokens computed, "
                f"{one.num_blocks} blocks"
            )
    return lines


@CHECKS.add("Blocks for a chunk", 1)
def check_blocks(lab: Any, story: Story) -> None:
    """As many as are missing, and never fewer than none."""
    for computed, new, held in product(range(9), range(1, 6), range(4)):
        sequence = lab.Sequence("A", 20, computed, held)
        call = f"new_blocks(A, {new}, 4), {computed} tokens computed, {held} blocks held"
        story[:] = [call]
        count = expect_type(lab.new_blocks(sequence, new, 4), int, call)
        right = max(0, -(-(computed + new) // 4) - held)
        if count == right:
            continue
        picture = [f"{call}  ->  {count}, not {right}"]
        if count < 0:
            raise Mistake("negative-blocks", "A sequence lacks fewer than no blocks.", picture)
        if count < right:
            what = "Too few blocks: the last one that is begun counts as well."
            raise Mistake("last-block-forgotten", what, picture, "Its tokens have no slot.")
        if held and count == right + held:
            raise Mistake("held-blocks-ignored", "Blocks that it holds are taken again.", picture)
        raise Mistake("too-many-blocks", "More blocks are taken than are needed.", picture)


@CHECKS.add("Taking blocks and budget", 1, 2)
def check_take(lab: Any, story: Story) -> None:
    """All or nothing, and both are counted."""
    step = lab.Step([lab.Sequence("A", 9)], [], free_blocks=2, budget=6)
    story += [*_drawn(step), "take(step, A, 5)"]
    taken = expect_type(lab.take(step, step.running[0], 5), bool, "take(step, A, 5)")
    picture = [*story, f"->  {taken}, budget {step.budget}, free {step.free_blocks}, {step.chunks}"]
    if not taken or step.chunks != {"A": 5}:
        raise Mistake("chunk-not-noted", "There is room, and the chunk is not noted.", picture)
    if step.budget != 1:
        what = "The budget does not go down by the tokens of the chunk."
        raise Mistake("budget-not-spent", what, picture, "Steps become longer than they may be.")
    if step.free_blocks != 0 or step.running[0].num_blocks != 2:
        raise Mistake("blocks-not-counted", "Blocks are not taken, or not counted.", picture)
    for free, budget in ((1, 6), (2, 4)):
        step = lab.Step([lab.Sequence("A", 9)], [], free_blocks=free, budget=budget)
        story[:] = [*_drawn(step), "take(step, A, 5)"]
        taken = lab.take(step, step.running[0], 5)
        state = step.free_blocks, step.budget, step.running[0].num_blocks, step.chunks
        picture = [*story, f"->  {taken}; free, budget, blocks, chunks: {state}"]
        if taken:
            kind = "budget-exceeded" if budget < 5 else "blocks-exceeded"
            raise Mistake(kind, "More is taken than there is.", picture)
        if state != (free, budget, 0, {}):
            what = "What does not fit has changed something."
            raise Mistake("refusal-has-effects", what, picture, "Law 6: all or nothing.")


@CHECKS.add("Preemption", 3)
def check_preempt(lab: Any, story: Story) -> None:
    """Blocks, chunk and place."""
    one, other, third = (lab.Sequence(name, 9, 8, 2) for name in "ABC")
    waiting = lab.Sequence("D", 4)
    step = lab.Step([one, other, third], [waiting], free_blocks=0, budget=5, chunks={"C": 1})
    story += [*_drawn(step), "C has a chunk of 1 in this step; preempt(step, C)"]
    lab.preempt(step, third)
    names = [each.name for each in step.waiting]
    picture = [*story, f"free {step.free_blocks}, budget {step.budget}, chunks {step.chunks}, "
               f"C has {third.num_blocks} blocks", f"waiting: {' '.join(names)}"]  # fmt: skip
    if step.free_blocks != 2 or third.num_blocks:
        what = "The blocks of a preempted sequence are not free again."
        raise Mistake("preempted-keeps-blocks", what, picture)
    if step.chunks or step.budget != 6:
        what = "A preempted sequence keeps its chunk, or the budget of it."
        raise Mistake("preempted-keeps-its-chunk", what, picture, "It has no blocks to write to.")
    if third in step.running or third.num_computed:
        what = "A preempted sequence still runs, or counts as computed what was taken."
        raise Mistake("preempted-still-runs", what, picture)
    if names != ["C", "D"]:
        what = "A preempted sequence loses its place to one that came later."
        raise Mistake("preempted-loses-its-place", what, picture)


@CHECKS.add("Decodes first, then chunks", 1, 2, 3, 4)
def check_running(lab: Any, story: Story) -> None:
    """No decode waits for a prompt; no chunk is above its limits; the last one is preempted."""
    prompt, decode = lab.Sequence("P", 20, 4, 1), lab.Sequence("D", 9, 8, 2)
    step = lab.Step([prompt, decode], [], free_blocks=9, budget=4, max_chunk=4)
    chunks = _planned(lab.plan_running, step, story)
    picture = [*story, f"->  {chunks}, not D 1, P 3"]
    if "D" not in chunks:
        what = "A prompt takes the whole budget, and a sequence that decodes gets no token."
        raise Mistake(
            "decode-starves", what, picture, "Every reader's text stands still for a step."
        )
    if chunks.get("P") != 3:
        raise Mistake("budget-not-used", "The prompt gets all that decodes leave.", picture)
    step = lab.Step([lab.Sequence("P", 20, 4, 1)], [], free_blocks=9, budget=8, max_chunk=3)
    chunks = _planned(lab.plan_running, step, story)
    if chunks.get("P", 0) > 3:
        what = "A chunk is longer than max_chunk."
        raise Mistake("chunk-too-long", what, [*story, f"->  {chunks}, not P 3"])
    step = lab.Step([lab.Sequence("P", 6, 4, 1)], [], free_blocks=9)
    chunks = _planned(lab.plan_running, step, story)
    if chunks.get("P") != 2:
        what = "A chunk goes beyond the end of the prompt, or ends before it."
        raise Mistake("chunk-past-the-end", what, [*story, f"->  {chunks}, not P 2"])
    _check_short(lab, story)


def _check_short(lab: Any, story: Story) -> None:
    """Three decodes that each need a block, and none is free."""
    running = [lab.Sequence(name, 9, 8, 2) for name in "ABC"]
    step = lab.Step(running, [], free_blocks=0)
    chunks = _planned(lab.plan_running, step, story)
    names = "".join(one.name for one in step.running)
    picture = [*story, f"->  {chunks}, running {names}, waiting "
               f"{''.join(one.name for one in step.waiting) or 'none'}"]  # fmt: skip
    if names == "BC" or "A" not in names:
        what = "The sequence that came first is preempted."
        why = "It is nearest to its end: all would be preempted in turn, and none would end."
        raise Mistake("preempts-the-first", what, picture, why)
    if chunks != {"A": 1, "B": 1} or names != "AB":
        what = "A and B have to go on with the two blocks of C, which came last."
        raise Mistake("preemption-wrong", what, picture)
    if not step.is_short:
        what = "is_short is not set, so that admission would take the blocks that are missing."
        raise Mistake("shortage-not-noted", what, picture)


@CHECKS.add("Admission", 1, 2, 3, 4, 5)
def check_admit(lab: Any, story: Story) -> None:
    """In order, within seats and blocks, and not while a running one is short."""
    step = lab.Step([], [lab.Sequence("A", 12), lab.Sequence("B", 4)], free_blocks=2)
    chunks = _planned(lab.admit, step, story)
    admitted = [one.name for one in step.running]
    picture = [*story, f"->  {chunks}, running {' '.join(admitted) or 'none'}", "not one of them"]
    if "A" in admitted:
        what = "A prompt is admitted without blocks for all of its tokens."
        why = "Two half prompts can wait for each other's blocks for ever."
        raise Mistake("admitted-without-room", what, picture, why)
    if admitted:
        what = "A short prompt overtakes the head of the queue, which does not fit."
        why = "Short prompts that keep coming would keep a long one waiting for ever."
        raise Mistake("head-is-skipped", what, picture, why)
    step = lab.Step(
        [lab.Sequence("R", 9, 8, 3)], [lab.Sequence("A", 4)], free_blocks=5, max_running=1
    )
    chunks = _planned(lab.admit, step, story)
    if chunks:
        raise Mistake("too-many-running", "More sequences run than may.", [*story, f"->  {chunks}"])
    step = lab.Step([], [lab.Sequence("A", 4)], free_blocks=5, is_short=True)
    chunks = _planned(lab.admit, step, story)
    if chunks:
        what = "A prompt is admitted while a running sequence lacks blocks."
        raise Mistake("admitted-while-short", what, [*story, "is_short", f"->  {chunks}"])
    step = lab.Step([], [lab.Sequence("A", 12), lab.Sequence("B", 6)], free_blocks=5, budget=6)
    chunks = _planned(lab.admit, step, story)
    blocks = [one.num_blocks for one in step.running]
    picture = [*story, f"->  {chunks}, blocks {blocks}, free {step.free_blocks}"]
    if not chunks:
        raise Mistake("nothing-admitted", "There is a seat, budget and room for A.", picture)
    if chunks.get("A") == 4 and blocks[0] == 1:
        what = "A prompt is admitted with the blocks of its first chunk alone."
        why = "Those of its next chunk may be gone by then, and it is preempted half computed."
        raise Mistake("blocks-of-a-chunk-alone", what, [*picture, "A needs 3 blocks"], why)
    if chunks != {"A": 4, "B": 2} or blocks != [3, 2] or step.waiting:
        what = "A gets 3 blocks and a chunk of 4, B 2 blocks and the 2 tokens that are left."
        raise Mistake("admission-wrong", what, picture)


@CHECKS.add("Limits of all small steps", 1, 2, 3, 4, 5)
def check_all(lab: Any, story: Story) -> None:
    """Budget, chunk, seats and blocks."""
    sizes = {"D": 9, "E": 6, "F": 3}
    for budget, chunk, free, seats in product((2, 5), (1, 4), (0, 2, 5), (2, 4)):
        for kinds in product(range(3), repeat=3):
            running = [_running(lab, name, kind) for name, kind in zip("ABC", kinds, strict=True)]
            running = running[:seats]
            waiting = [lab.Sequence(name, size) for name, size in sizes.items()]
            total = free + sum(one.num_blocks for one in running)
            step = lab.Step(running, waiting, free, max(budget, seats), chunk, seats)
            start = step.budget
            chunks = _planned(lab.plan, step, story)
            held = sum(one.num_blocks for one in (*step.running, *step.waiting))
            picture = [*story, f"->  {chunks}, free {step.free_blocks}, held {held}"]
            if sum(chunks.values()) > start or max(chunks.values(), default=0) > chunk:
                raise Mistake("budget-exceeded", "A step is longer than it may be.", picture)
            if step.free_blocks < 0 or step.free_blocks + held != total:
                what = "Blocks are lost, or given away twice."
                raise Mistake("blocks-leak", what, picture, "Free and held are all blocks (law 9).")


def _running(lab: Any, name: str, kind: int) -> Any:
    """Return a decode that needs a block, one that needs none, or a prompt."""
    computed, total, blocks = ((8, 9, 2), (6, 7, 2), (4, 12, 3))[kind]
    return lab.Sequence(name, total, computed, blocks)


@CHECKS.add("A rank", 6)
def check_rank(lab: Any, story: Story) -> None:
    """What is left to compute counts, and who has waited long enough."""
    ranking = lab.Ranking()
    call = "rank(100, 90, 0)"
    story.append(call)
    rank = expect_type(ranking.rank(100, 90, 0), int, call)
    if ranking.rank(500, 0, 0) <= ranking.rank(20, 0, 0):
        picture = [f"rank(500, 0, 0)  ->  {ranking.rank(500, 0, 0)}",
                   f"rank(20, 0, 0)  ->  {ranking.rank(20, 0, 0)}"]  # fmt: skip
        raise Mistake("longest-first", "The prompt with the most left goes first.", picture)
    if rank >= ranking.rank(20, 0, 0):
        picture = [f"{call}  ->  {rank}", f"rank(20, 0, 0)  ->  {ranking.rank(20, 0, 0)}"]
        what = "A prompt with 10 tokens left goes behind one with 20 left: hits do not count."
        raise Mistake("rank-ignores-hits", what, picture)
    if ranking.rank(500, 0, 3) >= ranking.rank(1, 0, 0):
        picture = [f"rank(500, 0, 3)  ->  {ranking.rank(500, 0, 3)}",
                   f"rank(1, 0, 0)  ->  {ranking.rank(1, 0, 0)}"]  # fmt: skip
        what = "A prompt that was overtaken three times still goes behind a short one."
        raise Mistake("long-prompts-starve", what, picture, "Short prompts never stop coming.")


def _planned(call: Any, step: Any, story: Story) -> dict[str, int]:
    """Run a part of the planner, and return the chunks of the step."""
    story[:] = [*_drawn(step), f"{call.__name__}(step)"]
    call(step)
    expect_type(step.chunks, dict, f"{call.__name__}: step.chunks")
    chunks: dict[str, int] = step.chunks
    return chunks
