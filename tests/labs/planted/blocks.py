"""Mistakes of lab 1: the kind that the check names, and the change that plants it."""

PLANTED = {
    "hits-all-tokens": ("(num_tokens - 1) // block_size", "num_tokens // block_size"),
    "half-a-block": ("(num_tokens - 1) // block_size * block_size", "num_tokens - 1"),
    "hashes-the-container": ('struct.pack(f"<{len(tokens)}I", *tokens)', "str(tokens).encode()"),
    "tokens-run-together": (
        'struct.pack(f"<{len(tokens)}I", *tokens)',
        '"".join(map(str, tokens)).encode()',
    ),
    "tokens-cut-short": (
        'struct.pack(f"<{len(tokens)}I", *tokens)',
        "bytes(t % 256 for t in tokens)",
    ),
    "order-ignored": ("*tokens)).digest()", "*sorted(tokens))).digest()"),
    "parent-ignored": ("sha256(parent + struct", "sha256(struct"),
    "short-digest": ("*tokens)).digest()", "*tokens)).digest()[:4]"),
    "wrong-type": ("*tokens)).digest()", "*tokens)).hexdigest()"),
    "partial-block-hashed": ("len(tokens) - self.block_size + 1", "len(tokens)"),
    "block-forgotten": ("len(tokens) - self.block_size + 1", "len(tokens) - self.block_size"),
    "chain-is-broken": ("parent = block_digest(parent,", "parent = block_digest(ROOT,"),
    "match-goes-on-after-a-miss": ("                break\n", "                continue\n"),
    "blocks-out-of-order": ("        return match\n", "        return match[::-1]\n"),
    "newer-block-replaces": (
        "return [self.blocks.setdefault(digest, block) for digest, block in pairs]",
        "self.blocks.update(pairs)\n        return list(blocks)",
    ),
    "insert-returns-own-blocks": (
        "return [self.blocks.setdefault(digest, block) for digest, block in pairs]",
        "[self.blocks.setdefault(digest, block) for digest, block in pairs]\n"
        "        return list(blocks)",
    ),
    "match-has-effects": ("break\n", "self.blocks[digest] = -1\n                break\n"),
    "remove-forgets-nothing": (
        "del self.blocks[self.chain(tokens)[-1]]",
        "self.chain(tokens).pop()",
    ),
    "remove-takes-the-wrong-block": ("self.chain(tokens)[-1]", "self.chain(tokens)[0]"),
}
