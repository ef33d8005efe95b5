"""Lab 5: a scheduler's step: chunks, budget, preemption.

Fill the holes, then run ``ostinato labs check 5``.
"""

from dataclasses import dataclass, field


@dataclass
class Sequence:
    """A prompt and its answer so far.

    Attributes:
        name: Its name.
        num_tokens: Prompt and answer tokens so far.
        num_computed: Leading tokens whose KV is written.
        num_blocks: Blocks that it holds.
    """

    name: str
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed: 1 if it decodes, more in a prompt."""
        return self.num_tokens - self.num_computed


@dataclass
class Step:
    """One step, while it is planned.

    Attributes:
        running: Sequences that hold blocks, by arrival.
        waiting: Sequences that hold none, by arrival.
        free_blocks: Blocks that may be taken.
        budget: Tokens that may still be computed in this step.
        max_chunk: Most tokens of one sequence in this step.
        max_running: Most sequences that hold blocks.
        block_size: Tokens per block.
        chunks: Tokens that each sequence computes in this step, by name.
        is_short: Whether a running sequence found too few blocks.
    """

    running: list[Sequence]
    waiting: list[Sequence]
    free_blocks: int
    budget: int = 8
    max_chunk: int = 4
    max_running: int = 4
    block_size: int = 4
    chunks: dict[str, int] = field(default_factory=dict)
    is_short: bool = False


def new_blocks(sequence: Sequence, num_new: int, block_size: int) -> int:
    """Return how many blocks a sequence lacks to compute ``num_tokens`` more tokens."""
    # Hole 1 (Blocks for a chunk): after them num_computed + num_new tokens have slots; round up.
    needed = -(-(sequence.num_computed + num_new) // block_size)
    return max(0, needed - sequence.num_blocks)
    # End of hole 1.


def take(step: Step, sequence: Sequence, num_new: int) -> bool:
    """Give a sequence blocks and budget for ``num_tokens``; False, with no effect, if too few."""
    # Hole 2 (Blocks for a chunk): note the chunk under its name; budget and free blocks go down.
    missing = new_blocks(sequence, num_new, step.block_size)
    if missing > step.free_blocks or num_new > step.budget:
        return False
    step.free_blocks -= missing
    sequence.num_blocks += missing
    step.budget -= num_new
    step.chunks[sequence.name] = num_new
    return True
    # End of hole 2.


def preempt(step: Step, sequence: Sequence) -> None:
    """Take a running sequence's blocks back and let it wait again; it keeps its tokens."""
    # Hole 3 (Preemption): its chunk of this step, if it has one, is taken back as well. It goes to
    # the front of those that wait, since it came before them, and has to compute all of it again.
    step.budget += step.chunks.pop(sequence.name, 0)
    step.free_blocks += sequence.num_blocks
    sequence.num_blocks = sequence.num_computed = 0
    step.running.remove(sequence)
    step.waiting.insert(0, sequence)
    # End of hole 3.


def plan_running(step: Step) -> None:
    """Give each running sequence its tokens, those that decode first."""
    # Hole 4 (Decodes first, then chunks): a decode gets its one token, a prompt as much as is left
    # of it, of the budget and of max_chunk. While blocks are missing, preempt the one that came
    # last of all that run, which may be the sequence itself, and set is_short.
    decoding = [one for one in step.running if one.num_left == 1]
    prompts = [one for one in step.running if one.num_left > 1]
    for sequence in decoding + prompts:
        while sequence in step.running:
            num_new = min(sequence.num_left, step.budget, step.max_chunk)
            if not num_new or take(step, sequence, num_new):
                break
            step.is_short = True
            preempt(step, step.running[-1])
    # End of hole 4.


def admit(step: Step) -> None:
    """Let waiting sequences run, in order, while there is a seat, budget and room."""
    # Hole 5 (Admission): none while a running one is short. A prompt takes blocks for all of its
    # tokens at once, and computes a chunk of them. The first that does not fit ends it: nothing
    # overtakes the head of the queue.
    while step.waiting and step.budget and len(step.running) < step.max_running:
        sequence = step.waiting[0]
        missing = new_blocks(sequence, sequence.num_left, step.block_size)
        if step.is_short or missing > step.free_blocks:
            break
        step.free_blocks -= missing
        sequence.num_blocks += missing
        step.running.append(step.waiting.pop(0))
        take(step, sequence, min(sequence.num_left, step.budget, step.max_chunk))
    # End of hole 5.


def plan(step: Step) -> dict[str, int]:
    """Plan a step; return how many tokens each sequence computes."""
    plan_running(step)
    admit(step)
    return step.chunks


class Ranking:
    """The order of waiting prompts: the lowest rank goes first."""

    def rank(self, num_tokens: int, num_cached: int, num_waited: int) -> int:
        """Return the rank of a prompt.

        Args:
            num_tokens: Its tokens.
            num_cached: Those of them that would hit now.
            num_waited: How many later prompts were admitted before it.
        """
        # Hole 6 (An order of your own): the fewest tokens left to compute go first, and a prompt
        # that was overtaken three times goes before all that were not.
        if num_waited >= 3:
            return -1
        return num_tokens - num_cached
        # End of hole 6.
