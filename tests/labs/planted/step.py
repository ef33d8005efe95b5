"""Mistakes of lab 5: the kind that the check names, and the change that plants it."""

PLANTED = {
    "last-block-forgotten": (
        "-(-(sequence.num_computed + num_new) // block_size)",
        "(sequence.num_computed + num_new) // block_size",
    ),
    "held-blocks-ignored": ("return max(0, needed - sequence.num_blocks)", "return needed"),
    "negative-blocks": ("max(0, needed - sequence.num_blocks)", "needed - sequence.num_blocks"),
    "budget-not-spent": ("    step.budget -= num_new\n", ""),
    "budget-exceeded": (" or num_new > step.budget:", ":"),
    "blocks-exceeded": ("if missing > step.free_blocks or num_new", "if num_new"),
    "blocks-not-counted": ("sequence.num_blocks += missing\n    step.budget", "step.budget"),
    "chunk-not-noted": ("    step.chunks[sequence.name] = num_new\n", ""),
    "preempted-keeps-blocks": ("    step.free_blocks += sequence.num_blocks\n", ""),
    "preempted-keeps-its-chunk": ("step.budget += step.chunks.pop(sequence.name, 0)", "pass"),
    "preempted-loses-its-place": ("waiting.insert(0, sequence)", "waiting.append(sequence)"),
    "preempted-still-runs": ("sequence.num_computed = 0", "0"),
    "blocks-of-a-chunk-alone": (
        "        step.free_blocks -= missing\n        sequence.num_blocks += missing\n",
        "",
    ),
    "decode-starves": ("in decoding + prompts:", "in prompts + decoding:"),
    "chunk-too-long": (
        "step.budget, step.max_chunk)\n            if",
        "step.budget)\n            if",
    ),
    "chunk-past-the-end": (
        "num_new = min(sequence.num_left, step.budget, step.max_chunk)",
        "num_new = min(step.budget, step.max_chunk) if sequence in prompts else 1",
    ),
    "preempts-the-first": ("preempt(step, step.running[-1])", "preempt(step, step.running[0])"),
    "shortage-not-noted": ("            step.is_short = True\n", ""),
    "head-is-skipped": (
        "sequence = step.waiting[0]",
        "step.waiting.reverse()\n        sequence = step.waiting[0]",
    ),
    "admitted-without-room": ("or missing > step.free_blocks", "or not step.free_blocks"),
    "too-many-running": (" and len(step.running) < step.max_running:", ":"),
    "admitted-while-short": ("if step.is_short or missing", "if missing"),
    "rank-ignores-hits": ("return num_tokens - num_cached", "return num_tokens"),
    "longest-first": ("return num_tokens - num_cached", "return num_cached - num_tokens"),
    "long-prompts-starve": ("if num_waited >= 3:", "if num_waited < 0:"),
}
