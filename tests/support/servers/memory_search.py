"""Search everything that an object reaches for a tenant's data.

::

    before = search(cache.prefix_cache, salt=b"salt", tokens=range(9000, 9010), digests=digests)
    assert before.salts and before.tokens and before.digests

Integers, texts, bytes and arrays are searched, wherever the garbage collector could go; code
is left out.
"""

import gc
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType

NOT_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)


@dataclass
class Traces:
    """What was found of a tenant, by kind: the number of places.

    Attributes:
        salts: Its salt.
        tokens: Its token ids, as integers or packed.
        digests: Digests of its prefixes.
    """

    salts: int = 0
    tokens: int = 0
    digests: int = 0


def search(
    root: object, salt: bytes, tokens: Collection[int] = (), digests: Collection[bytes] = ()
) -> Traces:
    """Look for a tenant's salt, token ids and digests in all that can be reached."""
    traces = Traces()
    packed = [token.to_bytes(4, "little") for token in tokens]
    for thing in reachable(root):
        if isinstance(thing, int):
            traces.tokens += thing in tokens
        elif isinstance(thing, (bytes, bytearray, memoryview, array, str)):
            content = thing.encode(errors="replace") if isinstance(thing, str) else bytes(thing)
            traces.salts += salt in content
            traces.tokens += any(token in content for token in packed)
            traces.digests += any(digest in content for digest in digests)
    return traces


def reachable(root: object) -> Iterator[object]:
    """Walk all data that a garbage collector could reach."""
    seen, stack = set(), [root]
    while stack:
        thing = stack.pop()
        if id(thing) not in seen and not isinstance(thing, NOT_DATA):
            seen.add(id(thing))
            yield thing
            stack += gc.get_referents(thing)
