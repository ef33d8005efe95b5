"""Requests join and leave at every step (Orca's iteration-level scheduling)."""

from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_a_prompt_is_computed_and_its_first_token_sampled_in_one_step():
    """The token that was sampled last is computed in the step after."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABC", max_tokens=3)
    assert tiny.step() == "one:ABC"
    assert tiny.outputs == {"one": "a"}
    assert tiny.step() == "one:a"
    assert tiny.outputs == {"one": "ab"}


def test_a_request_joins_those_that_decode_in_the_next_step():
    """No request waits for a batch to end; decodes stand before prefills."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABC", max_tokens=4)
    assert tiny.step() == "one:ABC"
    tiny.add("two", "XYZ", max_tokens=2)
    assert tiny.step() == "one:a two:XYZ"
    assert tiny.step() == "one:b two:a"
    assert tiny.step() == "one:c"


def test_no_more_than_max_num_seqs_run():
    """The third request takes the seat of the first one that ends, in the step after."""
    tiny = tiny_scheduler(max_num_seqs=2)
    tiny.add("one", "ABC", max_tokens=3)
    tiny.add("two", "DEF", max_tokens=1)
    tiny.add("three", "GHI", max_tokens=1)
    assert tiny.step() == "one:ABC two:DEF"
    assert tiny.state == "one | three"
    assert tiny.step() == "one:a three:GHI"


def test_without_requests_nothing_is_planned():
    """An empty plan asks for neither commit nor fail."""
    tiny = tiny_scheduler()
    assert not tiny.scheduler.has_work
    assert tiny.step() == tiny.step() == ""
    tiny.add("one", "ABC")
    assert tiny.scheduler.has_work
    assert tiny.step() == "one:ABC"
    assert not tiny.scheduler.has_work


def test_sequences_are_numbered_by_arrival_and_ranked_by_priority_then_number():
    """ChildIndex take the numbers behind the first; who arrives later stands behind them."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABC", max_tokens=2, n=3, priority=5)
    tiny.add("two", "DEF", max_tokens=2)
    tiny.step()
    ranks = {name: sequence.rank for name, sequence in tiny.sequences.items()}
    assert ranks == {"two": (0, 3), "one": (5, 0), "one/1": (5, 1), "one/2": (5, 2)}


def test_the_time_of_the_first_admission_is_kept():
    """The clock shows the number of steps; coming back later does not change it."""
    tiny = tiny_scheduler(max_num_seqs=1)
    tiny.add("one", "ABC", max_tokens=2)
    tiny.add("two", "DEF", max_tokens=3)
    for _ in range(3):
        tiny.step()
    tiny.preempt_all()
    tiny.run()
    assert tiny.sequences["one"].first_planned_s == 0
    assert tiny.sequences["two"].first_planned_s == 2


def test_outputs_do_not_depend_on_company():
    """Whatever else is in the batch, the same prompt and seed bring the same tokens."""
    alone = tiny_scheduler()
    alone.add("one", "ABCDEF", max_tokens=5)
    alone.run()
    crowd = tiny_scheduler(budget=5, num_blocks=5)
    for number in range(6):
        crowd.add(f"before {number}", "ABCDE"[number:] + "xyz", max_tokens=3)
    crowd.add("one", "ABCDEF", max_tokens=5)
    crowd.run()
    assert crowd.outputs["one"] == alone.outputs["one"] == "abcde"
