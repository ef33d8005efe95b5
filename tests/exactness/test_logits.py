"""Log-probabilities are those of the Hugging Face model in float64, wherever KV came from.

Greedy tokens agree while logits drift; so here the whole distribution is compared. Some families
compute their norms, RoPE and softmax in float32 whatever the dtype, hence the tolerance.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from ostinato import SamplingParams
from ostinato.engine.requests.outputs import Logprob
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import NUM_NEW, PROMPTS
from tests.exactness.test_greedy import every_family, every_family_on_an_index
from tests.support.engines import MakeLLM
from tests.support.models.model_families import VOCAB_SIZE

pytestmark = pytest.mark.one_case_in(3)

TOLERANCE = 1e-4
"""float32 inside the library was seen to change them by up to 1.5e-5."""


def as_rows(logprobs: Sequence[Mapping[int, Logprob] | None]) -> Tensor:
    """Return whole distributions as a tensor, shape (num_tokens, vocab_size), float64."""
    rows = [[row[token].logprob for token in range(VOCAB_SIZE)] for row in logprobs if row]
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Assert that two sets of distributions agree."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE  # False as well where there is a NaN


@every_family
def test_prompt_logprobs(family: str, make_llm: MakeLLM, reference_of: ReferenceOf):
    """All prompts in one row, in chunks of 11 tokens; the first token of each has none."""
    llm = make_llm(family, max_num_batched_tokens=11, max_num_seqs=5)
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB_SIZE, detokenize=False
    )

    outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        theirs = reference_of(family).logprobs(prompt)
        assert_close(as_rows(output.prompt_logprobs), theirs[:-1])


@every_family_on_an_index
def test_logprobs_behind_shared_and_copied_tokens(
    family: str, index: str, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """The second run reads blocks, copies, and the output of the first from the cache."""
    llm = make_llm(family, index=index)
    first = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    second = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=VOCAB_SIZE, detokenize=False
    )
    for prompt in PROMPTS:
        llm.generate([prompt], first, use_tqdm=False)
    prompts = [[*p[:-1], 2, 3] for p in PROMPTS]

    outputs = llm.generate(prompts, second, use_tqdm=False)

    assert sum(output.num_copied_tokens for output in outputs) > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.num_cached_tokens >= len(prompt) - 2
        completion = output.outputs[0]
        assert completion.logprobs is not None
        theirs = reference_of(family).logprobs(prompt + completion.token_ids)
        assert_close(as_rows(completion.logprobs), theirs[len(prompt) - 1 : -1])
