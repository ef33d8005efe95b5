"""What a request answers when it is alone: a serial loop without scheduler or cache."""

from array import array

from ostinato.core.plan import SampleTask
from ostinato.core.request import FinishReason, Request
from tests.support.cache.fake_runner import Sampler


def answer_alone(
    request: Request, seed: int, longest: int, sample: Sampler
) -> tuple[str, FinishReason]:
    """Continue a prompt to its end.

    Args:
        request: What to continue.
        seed: Of this continuation.
        longest: Most tokens of prompt and answer together.
        sample: Chooses each token.

    Returns:
        The answer, and why it ended.
    """
    params, output = request.params, array("I")
    while True:
        banned = request.eos_token_ids if len(output) < params.min_tokens else ()
        task = SampleTask(params, (seed,), request.prompt_token_ids, output[:], banned)
        output.append(token := sample(task, seed))
        ends = not params.ignore_eos and token in request.eos_token_ids
        if ends or token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(output) == params.max_tokens or len(task.prompt) + len(output) >= longest:
            reason = FinishReason.LENGTH
        else:
            continue
        return "".join(map(chr, output)), reason
