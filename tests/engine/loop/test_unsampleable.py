"""A request whose logits allow no token fails alone."""

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import StepFailed


def test_a_request_from_which_nothing_can_be_sampled_ends_alone():
    """It bans every id of the vocabulary; its neighbours in the batch go on."""
    llm = LLM(num_blocks=64)
    every_id = range(llm.engine.loaded.vocab_size)
    hopeless = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=every_id)
    fine = SamplingParams(max_tokens=4, temperature=0)

    with pytest.raises(StepFailed, match="1 of 3 requests failed: no token can be sampled") as info:
        llm.generate(["one", "two", "three"], [fine, hopeless, fine], use_tqdm=False)

    outputs = info.value.outputs
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error and not outputs[1].outputs[0].token_ids
    assert [output.has_own_error for output in outputs] == [False, True, False]
    llm.engine.cache.manager.check()
    assert llm.engine.cache.manager.num_live_tables == 0
