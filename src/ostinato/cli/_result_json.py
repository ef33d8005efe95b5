"""What does ``ostinato generate --json`` print?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato import CompletionOutput, RequestOutput
    from ostinato.engine.outputs import Logprob


def result_as_json(model: str, output: "RequestOutput") -> dict[str, object]:
    """Lay out a result in plain values; seconds are durations, null where nothing happened."""
    timings = output.timings
    return {
        "model": model,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "num_copied_tokens": output.num_copied_tokens,
        "outputs": [_completion(completion) for completion in output.outputs],
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "seconds": {
            "queue": timings.queue_time,
            "prefill": timings.prefill_time,
            "first_token": timings.time_to_first_token,
            "decode": timings.decode_time,
            "total": timings.total_time,
        },
    }


def _completion(completion: "CompletionOutput") -> dict[str, object]:
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": _logprobs(completion.logprobs),
    }


def _logprobs(
    positions: "Sequence[dict[int, Logprob] | None] | None",
) -> list[list[dict[str, object]] | None] | None:
    """Lay out one list per position, the token itself first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else [
            {
                "token_id": token_id,
                "token": logprob.decoded_token,
                "logprob": logprob.logprob,
                "rank": logprob.rank,
            }
            for token_id, logprob in position.items()
        ]
        for position in positions
    ]
