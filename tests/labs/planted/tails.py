"""Mistakes of lab 4: the kind that the check names, and the change that plants it."""

PLANTED = {
    "counts-behind-a-difference": (
        "        if left != right:\n            break\n        count += 1\n",
        "        count += left == right\n",
    ),
    "counts-too-few": ("return count\n", "return count // 2\n"),
    "sibling-of-another-prefix": ("if prefix[:start] == before and start <", "if start <"),
    "grandchildren-too": ("start < len(prefix) <= start + self.block_size", "start < len(prefix)"),
    "sealed-tail-missed": ("start < len(prefix) <= start", "len(prefix) == start"),
    "tail-of-nothing": ("if count and (best", "if (best"),
    "not-the-longest-tail": ("count > best[1])", "count < best[1])"),
    "tail-too-long": ("best = block, count", "best = block, len(own)"),
    "tail-missed": ("rest = tokens[start:]", "rest = tokens[start + 1 :]"),
    "sealed-twice": (
        "if any(other[: len(own)] == own for other, _ in self.siblings(tokens[:start])):",
        "if tuple(tokens) in self.blocks:",
    ),
    "seal-refuses-too-much": ("other[: len(own)] == own for", "other[:1] == own[:1] for"),
    "sealed-and-lost": ("self.blocks[tuple(tokens)] = block", "self.blocks[own] = block"),
    "copied-backwards": ("(first + offset, to + offset)", "(to + offset, first + offset)"),
    "whole-block-copied": ("for offset in range(num_tokens)", "for offset in range(block_size)"),
    "blocks-for-slots": ("source * block_size, target * block_size", "source, target"),
    "copies-its-own-block": ("if ref_counts[shared] == 1:", "if not ref_counts[shared]:"),
    "writes-what-others-read": ("if ref_counts[shared] == 1:", "if ref_counts[shared]:"),
    "keeps-its-old-hold": ("    ref_counts[shared] -= 1\n", ""),
    "own-block-not-held": ("    ref_counts[own] = 1\n", ""),
    "stays-free": ("own = free.pop()", "own = free[-1]"),
    "table-not-changed": ("    table[place] = own\n", ""),
    "refusal-has-effects": (
        '    if not free:\n        raise MemoryError("no block is free")\n    own = free.pop()\n'
        "    ref_counts[shared] -= 1\n",
        "    ref_counts[shared] -= 1\n"
        '    if not free:\n        raise MemoryError("no block is free")\n    own = free.pop()\n',
    ),
}
