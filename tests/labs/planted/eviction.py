"""Mistakes of lab 3: the kind that the check names, and the change that plants it."""

PLANTED = {
    "first-in-first-out": (
        "        for entry in entries:\n            del self.queue[entry]\n",
        "        self.gone = {*getattr(self, 'gone', ()), *entries}\n",
    ),
    "most-recently-used": ("for entry in self.queue if", "for entry in reversed(self.queue) if"),
    "victim-has-effects": (
        "        return next((entry for entry in self.queue if entry.is_leaf), None)\n",
        "        return self.queue.popitem(last=False)[0] if self.queue else None\n",
    ),
    "no-victim": ("if entry.is_leaf), None)", "if not entry.is_leaf), None)"),
    "root-before-leaf": ("for entry in self.queue if entry.is_leaf)", "for entry in self.queue)"),
    "holder-not-counted": (
        "for block in path:\n        block.ref_count += 1",
        "path[-1].ref_count += 1",
    ),
    "held-stays-evictable": (
        "    policy.remove([block for block in path if not block.ref_count])\n",
        "",
    ),
    "release-miscounts": (
        "for block in path:\n        block.ref_count -= 1",
        "path[-1].ref_count -= 1",
    ),
    "held-becomes-evictable": (
        "[block for block in reversed(path) if not block.ref_count]",
        "path[::-1]",
    ),
    "idle-is-forgotten": (
        "    policy.add([block for block in reversed(path) if not block.ref_count])\n",
        "",
    ),
    "released-root-first": ("for block in reversed(path) if", "for block in path if"),
    "released-twice": ("raise ValueError(", "print("),
    "refusal-has-effects": (
        "    if any(not block.ref_count for block in path):\n"
        '        raise ValueError("a block is released that is not held")\n'
        "    for block in path:\n        block.ref_count -= 1\n",
        "    for block in path:\n"
        "        if not block.ref_count:\n"
        '            raise ValueError("a block is released that is not held")\n'
        "        block.ref_count -= 1\n",
    ),
    "half-a-refusal": ("    if num_blocks > len(policy.queue):\n        return []\n", ""),
    "parent-keeps-its-child": (
        "        if block.parent is not None:\n            block.parent.num_children -= 1\n",
        "",
    ),
    "evicted-stays-evictable": (
        "policy.remove([block])",
        "if block.parent is not None:\n            policy.remove([block])",
    ),
    "wrong-number-evicted": ("len(evicted) < num_blocks and", "len(evicted) < num_blocks - 1 and"),
}
