"""States by hand: plans say which slots are loaded, used and saved; the runner knows no prefix.

::

    bench = Bench(loaded, num_state_slots=4)
    leader = bench.sequence(prompt, state_slot=0)
    bench.step(leader.next(64), saves=[StateCopy(0, 2)])    # slot 2: the checkpoint of 64 tokens
"""

import pytest
import torch

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StateCopy
from ostinato.runner.states.store import StateShape, StateSpec, StateStore
from tests.runner.bench import Bench, generated_alone, random_prompt
from tests.runner.conftest import Served


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba"])
def test_a_chunk_continues_from_a_checkpoint_beside_decodes_and_strangers(family, served: Served):
    """The checkpoint of 20 tokens is loaded for another prompt while its owner decodes."""
    loaded = served(family)
    prompt, strange = random_prompt(1, 40), random_prompt(3, 12)
    other = prompt[:20] + random_prompt(2, 9)
    bench = Bench(loaded, num_state_slots=4)
    leader = bench.sequence(prompt, state_slot=0)
    bench.step(leader.next(20), saves=[StateCopy(0, 2)])
    (token,) = bench.step(leader.rest())
    assert token is not None
    leader.tokens.append(token)
    follower = bench.sequence(other, shared=leader.blocks[:5], computed=20, state_slot=1)
    stranger = bench.sequence(strange, state_slot=3)

    loads = StateCopy(2, 1), StateCopy(None, 3)
    tokens = bench.step(leader.rest(), follower.rest(), stranger.rest(), loads=loads)

    said = [generated_alone(loaded, each, 2) for each in (prompt, other, strange)]
    assert [token, *tokens] == [*said[0], said[1][0], said[2][0]]


def test_copies_are_made_in_order_and_in_every_layer():
    spec = StateSpec({1: (StateShape((2,), torch.float32),), 3: (StateShape((1,), torch.int64),)})
    store = StateStore(spec, 3)
    for layer in (1, 3):
        store.states(layer)[0][:] = torch.arange(3)[:, None]

    store.copy([StateCopy(2, 0), StateCopy(0, 1), StateCopy(None, 2)])

    assert store.states(1)[0].tolist() == [[2, 2], [2, 2], [0, 0]]
    assert store.states(3)[0].tolist() == [[2], [2], [0]]
    assert spec.bytes_per_slot == 16 and store.num_bytes == 48


def test_states_that_do_not_fit_are_refused_with_what_to_lower():
    spec = StateSpec({0: (StateShape((2**40,), torch.float32),)})

    with pytest.raises(ConfigError, match="lower num_state_slots or kv_cache_memory"):
        StateStore(spec, 1000)
