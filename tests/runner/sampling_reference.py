"""The sampler again, slow and obvious: one row, one token, one Python number at a time."""

import math
from array import array
from collections.abc import Sequence

from ostinato.core.plan import SampleTask
from ostinato.core.sampling_params import SamplingParams

NARROW = 1e-9
"""Two numbers this close are a coin that rounding may toss."""


class TooClose(Exception):
    """A choice depends on the last bits, so that two answers are correct."""


def task(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    seeds: Sequence[int] = (1,),
    **params: object,
) -> SampleTask:
    """A sample task from plain lists."""
    return SampleTask(
        SamplingParams(**params),
        tuple(seeds),
        array("I", prompt),
        array("I", output),
        tuple(banned),
    )


def edited(logits: Sequence[float], job: SampleTask) -> list[float]:
    """Bias, penalties and bans, token by token."""
    params, result = job.params, []
    for token, logit in enumerate(logits):
        value = logit + params.logit_bias.get(token, 0.0)
        if token in job.prompt or token in job.output:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = job.output.count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        result.append(-math.inf if token in job.banned else value)
    return result


def distribution(logits: Sequence[float], job: SampleTask) -> list[float]:
    """The probability of each token after everything that was asked for."""
    params, scores = job.params, edited(logits, job)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(len(scores))]
    best = scores[order[0]]
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    weights = [0.0 if _below(weight, params.min_p) else weight for weight in weights]
    if params.top_k:
        weights = _keep(weights, order[: params.top_k])
    if params.top_p < 1:
        weights = _keep(weights, _nucleus(weights, order, params.top_p))
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def inverse_cdf(probabilities: Sequence[float], number: float) -> int:
    """The token whose stretch of [0, 1) holds a number."""
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if _below(number, reached):
            return token
    raise TooClose


def _nucleus(weights: Sequence[float], order: Sequence[int], top_p: float) -> list[int]:
    """The most likely tokens until those before have reached a share of the mass."""
    kept, mass, goal = [], 0.0, top_p * math.fsum(weights)
    for token in order:
        if not _below(mass, goal):
            break
        kept.append(token)
        mass += weights[token]
    return kept


def _keep(weights: Sequence[float], kept: Sequence[int]) -> list[float]:
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]


def _below(left: float, right: float) -> bool:
    """Whether one number is below another, both being exact or clearly apart."""
    if left != right and abs(left - right) < NARROW:
        raise TooClose
    return left < right
