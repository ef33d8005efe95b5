"""Long prompts are computed in chunks, beside the decodes (Sarathi)."""

import pytest

from ostinato.core.errors import ConfigError
from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    """Only the last chunk brings a token."""
    tiny = tiny_scheduler(budget=6)
    tiny.add("long", "ABCDEFGHIJKLMNO")
    assert tiny.step() == "long:ABCDEF"
    assert tiny.step() == "long:GHIJKL"
    assert tiny.outputs == {}
    assert tiny.step() == "long:MNO"
    assert tiny.outputs == {"long": "a"}


def test_decodes_never_starve_while_a_long_prompt_is_computed():
    """Each of the three gets its token in every step; the prompt gets what they leave."""
    tiny = tiny_scheduler(budget=6)
    for name in ("one", "two", "three"):
        tiny.add(name, name[0].upper(), max_tokens=6)
    assert tiny.step() == "one:O two:T three:T"
    tiny.add("long", "ABCDEFGH")
    assert tiny.step() == "one:a two:a three:a long:ABC"
    assert tiny.step() == "one:b two:b three:b long:DEF"
    assert tiny.step() == "one:c two:c three:c long:GH"


def test_decodes_go_first_also_before_a_prompt_that_came_earlier():
    """Two decodes take two of the four tokens, although the prompt of better rank wants three."""
    tiny = tiny_scheduler(budget=4, max_chunk_tokens=3)
    tiny.add("long", "ABCDEFGHI")
    tiny.add("short", "Q", n=2, max_tokens=3)
    assert tiny.step() == "long:ABC short:Q"
    assert tiny.step() == "short:a short/1:k long:DE"
    assert tiny.step() == "short:b short/1:l long:FG"
    assert tiny.step() == "long:HI"


def test_a_prefill_for_which_nothing_is_left_keeps_its_blocks_and_waits():
    """Three decodes and the first prefill take all five; no other request is admitted meanwhile."""
    tiny = tiny_scheduler(budget=5, max_chunk_tokens=2)
    tiny.add("one", "ABCDEF")
    tiny.add("two", "GHIJKL")
    tiny.add("many", "Q", n=3, max_tokens=3)
    tiny.add("other", "X")
    assert tiny.step() == "one:AB two:GH many:Q"
    assert tiny.step() == "many:a many/1:k many/2:u one:CD"
    assert tiny.step() == "many:b many/1:l many/2:v one:EF"
    assert tiny.step() == "two:IJ other:X"


def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next():
    tiny = tiny_scheduler(budget=6)
    tiny.add("one", "ABCDEFGHI")
    tiny.add("two", "QRSTUV")
    assert tiny.run() == ["one:ABCDEF", "one:GHI two:QRS", "two:TUV"]


def test_prompts_under_way_are_served_in_rank_not_in_order_of_admission():
    """The urgent one came later, and takes the whole budget as soon as it has a seat."""
    tiny = tiny_scheduler(budget=8, max_chunk_tokens=6)
    tiny.add("patient", "ABCDEFGHIJKLMN", priority=1)
    tiny.step()
    tiny.add("urgent", "QRSTUVWXYZ", priority=0)
    assert tiny.step() == "patient:GHIJKL urgent:QR"
    assert tiny.step() == "urgent:STUVWX patient:MN"
    assert tiny.step() == "urgent:YZ"


def test_hits_take_nothing_of_the_budget():
    tiny = tiny_scheduler(budget=6)
    tiny.serve("first", "ABCDEFGHIJKL")
    tiny.add("second", "ABCDEFGHIJKLxyz")
    tiny.add("third", "ABCDEFGHvwx")
    assert tiny.step() == "second:............xyz third:........vwx"


# --- max_chunk_tokens ------------------------------------------------------------------------


def test_a_limit_on_chunks_lets_a_short_prompt_pass_a_long_one():
    """Without it the long prompt takes the budget of three steps, and the short one waits."""
    tiny = tiny_scheduler(budget=6, max_chunk_tokens=4)
    tiny.add("long", "ABCDEFGHIJKLMNOP")
    tiny.add("short", "QR")
    assert tiny.step() == "long:ABCD short:QR"


def test_no_request_is_admitted_while_a_prefill_gets_nothing():
    """Three chunks of four do not fit into ten: so the third prompt gets two, the fourth waits."""
    tiny = tiny_scheduler(budget=10, max_chunk_tokens=4, max_num_seqs=4)
    for name, prompt in {"one": "ABCDEFGH", "two": "IJKLMNOP", "three": "QRSTUVWX"}.items():
        tiny.add(name, prompt)
    tiny.add("four", "YZ")
    assert tiny.step() == "one:ABCD two:IJKL three:QR"
    assert tiny.step() == "one:EFGH two:MNOP three:ST"
    assert tiny.step() == "three:UVWX four:YZ"


def test_a_limit_on_chunks_of_less_than_one_token_is_refused():
    with pytest.raises(ConfigError, match="max_chunk_tokens=0: must be an integer, at least 1"):
        tiny_scheduler(max_chunk_tokens=0)
