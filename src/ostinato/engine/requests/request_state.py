"""The state of one request: its tokens, texts, log-probabilities and times so far."""

from array import array
from collections.abc import Sequence
from operator import attrgetter, methodcaller

from ostinato.core.plan import SampledToken, TokenLogprob
from ostinato.core.request import FinishReason
from ostinato.engine.requests.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestTimings,
)
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.requests.sampling_params import RequestOutputKind
from ostinato.engine.text.detokenizer import Detokenizer, TokenTable
from ostinato.engine.text.stop_strings import StopChecker
from ostinato.engine.tiers.load_note import LoadNote
from ostinato.runner.images.store import ServedImage
from ostinato.runner.sampling.sampler import MODEL_FAULT
from ostinato.sched.sequence import Sequence as SchedSequence
from ostinato.scheduling.beam_search import BeamSearch

_FINISH_REASON = attrgetter("finish_reason")
_DRAFTED, _ACCEPTED = attrgetter("num_drafted_tokens"), attrgetter("num_accepted_tokens")


class CompletionState:
    """One continuation: its tokens, its text, and whether it has ended."""

    def __init__(self, index: int, prepared: PreparedRequest, tokens: TokenTable | None) -> None:
        request = prepared.request
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_streamed = 0  # tokens sent to its stream
        self.readout: array[float] | None = None
        self._params = prepared.params
        self._eos_token_ids = request.eos_token_ids
        self._tokens = tokens
        self._detokenizer: Detokenizer | None = None
        if tokens is not None and self._params.detokenize:
            skip = self._params.skip_special_tokens
            self._detokenizer = Detokenizer(tokens, skip, request.prompt_token_ids)
        self.stops: StopChecker | None = None
        if prepared.stops is not None:
            self.stops = StopChecker(prepared.stops, self._params.include_stop_str_in_output)

    def is_due(self, interval: int) -> bool:
        """Whether its stream gets its new tokens now: ``interval`` of them, the first or last."""
        num_new = len(self.token_ids) - self.num_streamed
        ends = not self.num_streamed or self.finish_reason is not None
        return num_new >= interval or (num_new > 0 and ends)

    def append(self, token: SampledToken, reason: FinishReason | None) -> None:
        """Add a token.

        Args:
            token: What was sampled.
            reason: Why the sequence ended with it, if it did. An id that stopped it is no part
                of the text, unless stop strings are to be included.
        """
        if token.readout is not None:  # what was sampled besides is no answer
            self.readout = token.readout
            return
        self.token_ids.append(token.token_id)
        if token.logprobs:
            self.logprobs.append(named_logprobs(token.logprobs, self._tokens))
            self.cumulative_logprob += token.logprobs[0].logprob
        if self._detokenizer is None:
            return
        new_text = ""
        ends = reason is FinishReason.STOP and self._ends_text(token.token_id)
        if not ends or self._params.include_stop_str_in_output:
            new_text = self._detokenizer.append([token.token_id])
        if self.stops is not None:
            may_stop = len(self.token_ids) > self._params.min_tokens
            new_text = self.stops.append(new_text, may_stop)
        self.text += new_text

    def _ends_text(self, token_id: int) -> bool:
        return token_id in self._params.stop_token_ids or token_id in self._eos_token_ids

    def end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Set why it ended, and release text that was held back."""
        stops = self.stops
        if self._detokenizer is not None and (stops is None or stops.matched is None):
            rest = self._detokenizer.finish()
            self.text += rest if stops is None else stops.append(rest) + stops.finish()
            if stops is not None and stops.matched is not None:
                # The last character completed it.
                reason, stop_reason = FinishReason.STOP, stops.matched
        self.finish_reason, self.stop_reason = reason, stop_reason


class RequestState:
    """One request: its continuations and when things happened."""

    def __init__(self, prepared: PreparedRequest, tokens: TokenTable | None) -> None:
        self.request, self.params = prepared.request, prepared.params
        self.error: str | None = None  # why it failed
        self.finished = False  # whether every continuation has ended
        self._has_own_error = False
        self.known = prepared.known  # its prompt, if its answers are to be remembered
        self.search = prepared.search  # its beams; None if it is sampled
        self.begun = prepared.begun  # where its answers are noted as turns; None if they are not
        self.images: tuple[ServedImage, ...] = ()  # kept for as long as steps may need them
        self.load_note: LoadNote | None = None  # what a tier had of its prompt
        self._prompt = prepared.prompt
        self._prompt_token_ids = prepared.request.prompt_token_ids.tolist()  # for all outputs
        self._tokens = tokens
        self._arrival_s = prepared.arrival_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._finished_s: float | None = None
        self._leader: SchedSequence | None = None
        self._sequences: dict[int, SchedSequence] = {}
        length = len(self._prompt_token_ids)
        self._scored = [*prepared.scored]
        self._first_scored = min(prepared.request.params.prompt_logprob_start, length)
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [
            *[None] * min(prepared.params.prompt_logprob_start, length),
            *[named_logprobs(row, tokens) for row in self._scored],
        ]
        self._completions = [
            CompletionState(index, prepared, tokens) for index in range(prepared.params.n)
        ]

    def next_output(self, interval: int) -> RequestOutput | None:
        """Return the output so far, if a stream gets it now.

        Args:
            interval: New tokens that make an output; the request may ask for more of them. The
                first and the last output are due at once.
        """
        num_new_tokens = max(interval, self.params.stream_interval or 1)
        is_due = self.search is not None or any(
            map(methodcaller("is_due", num_new_tokens), self._completions)
        )
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY or not is_due:
            return self.output() if self.finished else None
        for completion in self._completions:
            completion.num_streamed = len(completion.token_ids)
        return self.output()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that hit."""
        leader = self._leader
        return leader.num_shared_tokens + leader.num_copied_tokens if leader else 0

    def _cached_tokens_from(self, num_tokens: int) -> dict[str, int]:
        """Return the tokens that hit by where their keys and values came from."""
        leader, note = self._leader, self.load_note
        if leader is None or not num_tokens:
            return {}
        loaded = {} if note is None else note.loaded_before(leader.num_shared_tokens)
        in_pool = num_tokens - sum(loaded.values())
        return {"pool": in_pool, **loaded} if in_pool else loaded

    def take(self, sequence: SchedSequence, token: SampledToken | None, now_s: float) -> str | None:
        """Add a step's token to one continuation.

        Returns:
            The stop string that its text has now reached, if the scheduler does not know
            yet that it ended.
        """
        if sequence.index == 0:
            self._leader = sequence
        self._sequences[sequence.index] = sequence
        if token is not None and token.error:
            self.error = token.error
            self._has_own_error = not token.error.startswith(MODEL_FAULT)
        if self.search is not None:
            self._take_search(self.search, now_s)
            return None
        completion = self._completions[sequence.index]
        if token is not None and not token.error:
            if self._first_token_s is None:
                self._first_token_s = now_s
            self._last_token_s = now_s
            completion.append(token, sequence.finish_reason)
        stops = completion.stops
        if stops is not None and (stop_string := stops.matched) is not None:
            self._end(completion, FinishReason.STOP, stop_string, now_s)
            return stop_string if sequence.finish_reason is None else None
        if sequence.finish_reason is not None:
            self._end(completion, sequence.finish_reason, sequence.stop_reason, now_s)
        return None

    def _take_search(self, search: BeamSearch, now_s: float) -> None:
        """Note that beams got a token each; once the search is over, take its best answers."""
        if self._first_token_s is None:
            self._first_token_s = now_s
        self._last_token_s = now_s
        if self.finished or not (search.is_over or self.error):
            return
        answers = [] if self.error else search.answers
        for completion, answer in zip(self._completions, answers, strict=False):
            reason = FinishReason.LENGTH if answer.is_cut else FinishReason.STOP
            for token in answer.beam.tokens:
                completion.append(token, reason if token is answer.beam.token else None)
            last = completion.token_ids[-1]
            is_stopped = reason is FinishReason.STOP and last in self.params.stop_token_ids
            self._end(completion, reason, last if is_stopped else None, now_s)
        reason = FinishReason.ERROR if self.error else FinishReason.STOP
        for completion in self._completions[len(answers) :]:
            self._end(completion, reason, None, now_s)

    def fail(self, reason: FinishReason, error: str | None, now_s: float) -> None:
        """End every continuation that has not ended."""
        self.error, self._has_own_error = error, False
        for completion in self._completions:
            if completion.finish_reason is None:
                self._end(completion, reason, None, now_s)

    def answers(self) -> "list[array[int]]":
        """Return the tokens of each continuation, packed, but for those without any."""
        return [array("I", c.token_ids) for c in self._completions if c.token_ids]

    def whole_answers(self) -> "list[tuple[int, str, list[int]]]":
        """Return number, text and tokens of the continuations that the model ended itself.

        A stop string and its like are left out of the text, but not of the tokens.
        """
        return [
            (c.index, c.text, c.token_ids)
            for c in self._completions
            if c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            and c.stop_reason is None
            and not self.params.include_stop_str_in_output
        ]

    def output(self) -> RequestOutput:
        """Return the output so far."""
        leader, num_cached_tokens = self._leader, self.num_cached_tokens
        no_rows = self.params.prompt_logprobs is None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if no_rows else self._prompt_logprobs_so_far(),
            outputs=list(map(self._completion, self._completions)),
            finished=self.finished,
            num_cached_tokens=num_cached_tokens,
            cached_tokens_from=self._cached_tokens_from(num_cached_tokens),
            num_copied_tokens=leader.num_copied_tokens if leader else 0,
            num_waited_tokens=leader.num_waited_tokens if leader else 0,
            num_kept_tokens=self.request.num_kept_tokens,
            num_drafted_tokens=sum(map(_DRAFTED, self._sequences.values())),
            num_accepted_tokens=sum(map(_ACCEPTED, self._sequences.values())),
            timings=RequestTimings(
                arrival=self._arrival_s,
                first_scheduled=leader.first_planned_s if leader else None,
                first_token=self._first_token_s,
                finished=self._finished_s,
                last_token=self._last_token_s,
            ),
            num_beam_tokens=0 if self.search is None else self.search.num_tokens,
            error=self.error,
            has_own_error=self._has_own_error,
        )

    def _end(
        self,
        completion: CompletionState,
        reason: FinishReason,
        stop_reason: int | str | None,
        now_s: float,
    ) -> None:
        completion.end(reason, stop_reason)
        self.finished = None not in map(_FINISH_REASON, self._completions)
        if self.finished:
            self._finished_s = now_s

    def _completion(self, completion: CompletionState) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        reason = completion.finish_reason
        return CompletionOutput(
            index=completion.index,
            text=completion.text,
            token_ids=completion.token_ids[:],
            finish_reason=None if reason is None else str(reason),
            stop_reason=completion.stop_reason,
            logprobs=completion.logprobs[:] if has_logprobs else None,
            cumulative_logprob=(
                completion.cumulative_logprob if has_logprobs or self.search else None
            ),
            readout=completion.readout,
        )

    @property
    def prompt_rows(self) -> list[tuple[TokenLogprob, ...]]:
        """Log-probabilities of its prompt so far, from the first token that gets them."""
        return self._scored + ([] if self._leader is None else self._leader.prompt_logprobs)

    def _prompt_logprobs_so_far(self) -> list[dict[int, Logprob] | None]:
        """Return those of the prompt, each converted once; those before the first have none."""
        known = self._prompt_logprobs
        if self._leader is not None:
            new = self._leader.prompt_logprobs[len(known) - self._first_scored :]
            known += [named_logprobs(tokens, self._tokens) for tokens in new]
        return known[:]


def named_logprobs(tokens: Sequence[TokenLogprob], table: TokenTable | None) -> dict[int, Logprob]:
    """Key one position's log-probabilities by token id, with each token's text."""
    return {
        token.token_id: Logprob(
            logprob=token.logprob,
            rank=token.rank,
            decoded_token=None if table is None else table.text(token.token_id),
        )
        for token in tokens
    }
