"""Law 3 on every index: another image or another identity is another content."""

import pytest

from ostinato.core.identity import ImageSpan
from ostinato.observe.introspection import cached_blocks
from tests.support.cache.cache_views import found, prefix_key
from tests.support.cache.tiny_cache import tiny_cache

# --- images ---------------------------------------------------------------------------------


def test_an_image_is_part_of_the_block_that_it_touches(cache):
    cat, dog = ImageSpan(b"cat", 2, 4), ImageSpan(b"dog", 2, 4)
    cache.serve("AB####CD", images=[cat])

    assert found(cache, "AB####CDE", images=[cat]) == (8, 0)
    assert found(cache, "AB####CDE", images=[dog]) == (0, 2), "the text before it is shared"
    assert found(cache, "AB####CDE") == (0, 2)


def test_text_that_reads_like_an_image_finds_the_text_whichever_came_last(index):
    """Placeholders are tokens: the same run of them is cached with an image and without."""
    text, cat = "AB####CDEFGH", [ImageSpan(b"cat", 2, 4)]
    for prompts in ([(text, []), (text, cat)], [(text, cat), (text, [])]):
        cache = tiny_cache(12, index=index)
        for prompt, images in prompts:
            cache.serve(prompt, images=images)
        assert found(cache, text + "I") == (12, 0)
        assert found(cache, text + "I", images=cat) == (12, 0)


def test_the_same_image_at_another_offset_is_another_content(cache):
    """Both blocks read ####, the one begins with the image's first token, the other not."""
    cache.serve("A####BCD", images=[ImageSpan(b"cat", 1, 4)])
    assert found(cache, "A####BCDE", images=[ImageSpan(b"cat", 2, 3)]) == (0, 1)
    assert found(cache, "A####BCDE", images=[ImageSpan(b"cat", 1, 3)]) == (0, 1)


def test_image_tokens_are_never_copied_one_by_one(cache):
    """Half an image hits only as part of a whole block."""
    cat = ImageSpan(b"cat", 5, 6)
    cache.serve("ABCDE######X", images=[cat])
    assert found(cache, "ABCDE######", images=[cat]) == (8, 0)
    assert found(cache, "ABCDE###", images=[ImageSpan(b"cat", 5, 3)]) == (4, 1)


def test_text_behind_an_image_in_its_block_is_shared_token_by_token(index):
    """Two questions on an image of less than a block."""
    cache = tiny_cache(num_blocks=8, block_size=8, index=index)
    cat, dog = [ImageSpan(b"cat", 1, 3)], [ImageSpan(b"dog", 1, 3)]
    cache.serve("A###WHO?", images=cat)
    assert found(cache, "A###WHAT?", images=cat) == (0, 6)
    assert found(cache, "A###WHAT?", images=dog) == (0, 1)


def test_tokens_of_a_block_with_an_image_are_its_tokens_alone(cache):
    cache.serve("AB####CD", images=[ImageSpan(b"cat", 2, 4)])
    entries = [entry for run in cache.manager.index.runs() for entry in run.entries]
    key = prefix_key("AB####CD")
    assert b"".join(entry.run_from(0)[1] for entry in entries) == key.tokens.tobytes()


def test_it_is_known_where_a_hit_of_shared_tokens_will_end(index):
    """Behind a whole image, before half of one, and where a block ends within one."""
    cache, cat = tiny_cache(8, index=index), [ImageSpan(b"cat", 5, 9)]
    leader = cache.serve("ABCDE#########FGHIJK", images=cat).table
    for num_tokens, deepest in ((4, 4), (5, 5), (6, 5), (8, 8), (11, 8), (14, 14), (15, 15)):
        shared = prefix_key("ABCDE#########FGHIJK"[:num_tokens] + "xyzxyzxyzxyz", cat)
        assert cache.manager.deepest_hit(leader, shared, num_tokens) == deepest
        if num_tokens > 13 or num_tokens == 5:
            assert cache.manager.match(shared).num_tokens == deepest


def test_variants_of_an_image_live_side_by_side(cache):
    """Equal tokens, equal text, three contents; each is found by its own."""
    pictures = [[ImageSpan(name, 1, 3)] for name in (b"cat", b"dog", b"emu")]
    for images in pictures:
        cache.serve("A###", images=images)
    blocks = [cache.match("A###B", images=images).blocks[0] for images in pictures]
    assert len(set(blocks)) == 3
    contents = list(cached_blocks(cache.manager.index))
    assert len({(c.parent, c.tokens) for c in contents}) == 1
    assert len({(c.parent, c.tokens, c.extra) for c in contents}) == 3


# --- identity -------------------------------------------------------------------------------

OTHER_IDENTITIES = {
    "tenant": {"tenant": b"somebody"},
    "adapter": {"adapter": b"an adapter's digest"},
    "weights": {"weights": b"other weights"},
    "KV format": {"kv_dtype": "float16"},
}


@pytest.mark.parametrize("other", OTHER_IDENTITIES.values(), ids=OTHER_IDENTITIES)
def test_another_identity_finds_nothing(cache, other):
    """Law 3, in whole blocks and in tails, in both directions."""
    cache.serve("ABCDEF")
    assert found(cache, "ABCDEF", **other) == (0, 0)
    cache.serve("XYZWUV", **other)
    assert found(cache, "XYZWUV") == (0, 0)
    assert found(cache, "XYZWUV", **other) == (4, 1)


def test_identity_fields_do_not_run_into_each_other(cache):
    """ab + c is not a + bc."""
    cache.serve("ABCDEF", adapter=b"ab", tenant=b"c")
    assert found(cache, "ABCDEF", adapter=b"a", tenant=b"bc") == (0, 0)
    assert found(cache, "ABCDEF", tenant=b"abc") == (0, 0)
