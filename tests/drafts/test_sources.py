"""Where drafts come from: a sequence's own text, and cached blocks of its tenant."""

from array import array
from dataclasses import replace

import numpy as np

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.drafts.ngrams import LONG, SHORT, NgramTable, digests, salted, weigh
from ostinato.drafts.own_text import OwnText
from ostinato.drafts.tree_text import MAX_TOKEN_BYTES, TreeText, index_bytes

TEXT = "the quick brown fox jumps"
MANY_PLACES = 2**22
"""So many that no text here displaces another."""


def ids(text: str) -> "array[int]":
    return array("I", map(ord, text))


def spell(tokens: "array[int]") -> str:
    return "".join(map(chr, tokens))


class Caches:
    """A cache with blocks of four letters, and the text of its blocks."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.tree = TreeText(num_blocks, 4, num_places=MANY_PLACES)
        config = CacheConfig(num_blocks=num_blocks, block_size=4)
        self.manager = CacheManager(config, observers=[self.tree])

    def serve(self, text: str, identity: Identity | None = None) -> None:
        """Compute a prompt in one step, and release it."""
        key = PrefixKey(identity or Identity(), ids(text))
        self.manager.begin_step()
        admitted = self.manager.admit(key, self.manager.match(key), True, None, RequestContext())
        assert admitted is not None
        self.manager.publish(admitted[0], len(key))
        self.manager.commit()
        self.manager.release(admitted[0], len(key))

    def continued(self, tail: str, identity: Identity | None = None, length: int = SHORT) -> str:
        """What the tree has after some letters."""
        owners = self.tree.owners(identity or Identity())
        last = ids(tail)[-length:]
        return spell(self.tree.continuation(last, weigh(last), owners, 8))


def test_one_digest_at_a_time_is_that_of_all_at_once():
    tokens = np.arange(40, dtype=np.uint32) * 977
    for length in (SHORT, LONG):
        many = digests(tokens, length, salt=5)
        assert [int(d) for d in many] == [
            salted(weigh(tokens[i : i + length].tolist()), 5) for i in range(40 - length + 1)
        ]


def test_a_table_keeps_the_newest_position():
    table = NgramTable(SHORT, 256)
    table.put_all(digests(np.array([1, 2, 3, 4, 1, 2, 3, 4], dtype=np.uint32), SHORT), np.arange(5))
    assert table.get(salted(weigh([1, 2, 3, 4]))) == 4


def test_own_text_goes_on_as_it_did_where_its_last_tokens_stood():
    """In "abcdXYabcd" the last four letters stood before XY."""
    own, key = OwnText(MANY_PLACES), PrefixKey(Identity(), ids("abcdXYabcd"))
    own.update(key)
    place = own.place(key, SHORT)
    assert spell(own.read_on(key, place, 5)) == "XYabc"
    assert own.place(key, LONG) == 0, "no eight letters are repeated"


def test_a_repetition_goes_on_behind_the_end_of_the_text():
    own, key = OwnText(MANY_PLACES), PrefixKey(Identity(), ids("-xy-xy-xy-xy"))
    own.update(key)
    assert spell(own.read_on(key, own.place(key, LONG), 7)) == "-xy-xy-"


def test_own_text_is_indexed_token_by_token_and_in_bulk_alike():
    """A text that grows by one token finds what a new reader of the whole finds."""
    text = "".join(chr(97 + (n * n) % 7) for n in range(300))
    grown, key = OwnText(MANY_PLACES), PrefixKey(Identity(), ids(text[:50]))
    num_found = num_alike = 0
    for letter in text[50:]:
        key.append(ord(letter))
        grown.update(key)
        fresh = OwnText(MANY_PLACES)
        fresh.update(key)
        for length in (SHORT, LONG):
            num_found += grown.place(key, length) > 0
            num_alike += grown.place(key, length) == fresh.place(key, length)
    assert num_found > 400, "the text repeats itself"
    assert num_alike > 450, "but for places that two digests share"


def test_the_tree_goes_on_from_block_to_block():
    """A match that begins in one block and ends in the next, and reads into a third."""
    caches = Caches()
    caches.serve(TEXT)
    assert caches.continued("uick") == " brown f"
    assert caches.continued("he quick", length=LONG) == " brown f"
    assert caches.continued("slow") == ""


def test_the_newest_continuation_is_read():
    caches = Caches()
    caches.serve("the cat sat down")
    caches.serve("the cat ran away")
    assert caches.continued("cat ") == "ran away"


def test_a_tenant_is_never_offered_the_text_of_another():
    """Nor can it tell by what it is offered that another has the same text."""
    mine, other = (replace(Identity(), tenant=name) for name in (b"mine", b"other"))
    caches = Caches()
    caches.serve(TEXT, other)
    assert caches.continued("uick", mine) == ""
    assert caches.continued("uick", other) == " brown f"
    caches.serve("a quick lunch now", mine)
    before = caches.continued("uick", mine)
    for _ in range(3):
        caches.serve(f"{TEXT} over it", other)
    assert caches.continued("uick", mine) == before == " lunch n"


def test_a_sequence_reads_the_public_prefix_that_it_begins_with():
    public = replace(Identity(), tenant=b"public")
    mine = replace(Identity(), tenant=b"mine", base=public, start=8)
    caches = Caches()
    caches.serve("the rules of the house", public)
    assert caches.continued("rule", mine) == "s of the"
    assert caches.continued("rule", replace(Identity(), tenant=b"mine")) == ""


def test_text_behind_a_public_prefix_is_neither_offered_nor_hidden_by_another_tenant():
    """All go on from the same public blocks, and what follows there is each one's own."""
    public = replace(Identity(), tenant=b"public")
    ann, bob = (replace(public, tenant=t, base=public, start=8) for t in (b"ann", b"bob"))
    caches = Caches()
    caches.serve("the rule", public)
    before = caches.continued("rule", bob)
    caches.serve("the rules of ann's house", ann)
    assert caches.continued("rule", bob) == before == ""
    caches.serve("the rules of our street", bob)
    offered = [caches.continued(tail, bob) for tail in ("rule", "s of", "our ")]
    caches.serve("the rule is not ann's", ann)
    assert [caches.continued(tail, bob) for tail in ("rule", "s of", "our ")] == offered
    assert offered == ["", " our str", "str"]


def test_evicted_text_is_forgotten():
    """The second text takes the blocks of the first."""
    grams = [TEXT[i : i + SHORT] for i in range(19)]
    caches = Caches(num_blocks=6)
    caches.serve(TEXT[:24])
    assert all(caches.continued(tail) for tail in grams)
    caches.serve("0123456789ABCDEFGHIJKLMN")
    assert not [tail for tail in grams if caches.continued(tail)]


def test_text_of_a_failed_step_is_forgotten():
    caches = Caches()
    key = PrefixKey(Identity(), ids(TEXT))
    manager = caches.manager
    manager.begin_step()
    admitted = manager.admit(key, manager.match(key), True, None, RequestContext())
    assert admitted is not None
    manager.publish(admitted[0], len(key))
    assert caches.continued("uick") != ""
    manager.fail()
    assert caches.continued("uick") == ""


def test_a_cleared_cache_has_no_text():
    caches = Caches()
    caches.serve(TEXT)
    caches.manager.new_epoch(b"new")
    assert caches.continued("uick") == ""


def test_the_index_takes_at_most_so_many_bytes_a_token():
    for num_blocks in (1, 7, 100, 4096):
        assert index_bytes(num_blocks, 16) <= MAX_TOKEN_BYTES * 16 * num_blocks
