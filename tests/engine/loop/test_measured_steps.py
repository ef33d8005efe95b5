"""What a recorded engine's steps computed and took is what a cost model is fitted to."""

import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.lab.traces.recording import read_recording
from ostinato.lab.work.cost_model import cost_of, error_of, measured_steps, of_repeats
from ostinato.scheduling.price_fit import fit
from ostinato.scheduling.step_prices import Work


def test_each_step_has_its_work_and_its_time(tmp_path):
    with LLM(
        num_blocks=64, max_num_batched_tokens=32, max_num_seqs=8, record_trace=tmp_path / "t"
    ) as llm:
        prompts = ["Now is the winter of our discontent", "Now is the winter of my life, and then"]
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate(prompts * 2, params, use_tqdm=False)
    steps = measured_steps(read_recording(tmp_path / "t"))
    computed = sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs)
    # The last token of an answer is sampled and not computed.
    assert sum(work.tokens for work, _ in steps) == computed + 4 * 5
    assert all(work.steps == 1 and work.tokens <= 32 < 10**6 * work.pairs for work, _ in steps)
    assert all(0 < seconds < 60 for _, seconds in steps)


def test_a_recording_in_part_does_not_say_what_its_steps_computed(tmp_path):
    with LLM(num_blocks=64) as llm:
        one = SamplingParams(max_tokens=1)
        llm.generate("What was cached before", one, use_tqdm=False)
        llm.start_recording(tmp_path / "t")
        llm.generate("What was cached before, and more", one, use_tqdm=False)
        llm.stop_recording()
    with pytest.raises(ConfigError, match="an incomplete recording"):
        cost_of(read_recording(tmp_path / "t"))


def test_of_runs_done_again_each_step_has_the_median_of_its_times():
    works = [Work(1, 10, 55), Work(1, 1, 11)]
    runs = [[(work, seconds) for work in works] for seconds in (1.0, 9.0, 2.0)]
    runs.append([(Work(1, 7, 7), 50.0)])  # planned otherwise
    assert of_repeats(runs) == [(work, 2.0) for work in works]


def test_a_model_s_error_is_that_of_half_of_its_steps():
    works = [Work(1, n, n * n) for n in (1, 10, 100, 50, 20)]
    measured = [(work, 0.001 + work.tokens * 1e-5 + work.pairs * 1e-8) for work in works]
    cost = fit(measured, "exact")
    assert error_of(cost, measured) < 1e-6
    measured[0] = (works[0], 1.0)
    assert error_of(cost, measured) < 1e-6
