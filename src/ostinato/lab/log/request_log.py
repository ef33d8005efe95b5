"""A log of requests.

JSON lines or a JSON array, gzipped or not. Each record is the body of a request, or an object
around it, as batch files, gateways and proxies write it, with the response beside it::

    {"model": "m", "messages": [...]}                                   the body alone
    {"custom_id": "7", "url": "/v1/responses", "body": {"input": ...}}  batch files
    {"request_body": "{...}", "response_body": "{...}", ...}            bodies as strings
    {"request": {"body": {...}}, "response": {"body": {...}}}           nested in an envelope

Bodies are those of OpenAI's chat completions, completions and responses, and of Anthropic's
messages. What is not understood is an error that names the line and the field.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ostinato.core.tokens import pack_tokens
from ostinato.errors import BrokenTrace, TokenOutOfRange
from ostinato.lab.log import request_envelope as envelope
from ostinato.lab.log.lines import BrokenLine, ItemT, OnBroken, iter_lines
from ostinato.lab.log.logged_prompt import Block, LoggedPrompt, Message
from ostinato.lab.log.request_formats import read_prompts, read_reply
from ostinato.lab.log.request_spans import records_of

Render = Callable[["LoggedRequest"], str]
"""From a request to the text of its prompt."""

Encode = Callable[[str], list[int]]
"""From a text to token ids."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log.

    Attributes:
        line: Its line in the file, or its place in the array, counted from 1.
        prompt: The prompt, as the model reads it.
        model: The requested model; models share no cache.
        at_s: Time in seconds since 1970; None if the log does not say.
        tenant: Tenant, within which the cache is shared; empty if the log does not say.
        user: The client's end user, if named.
        reply: The answer; empty if the log does not say.
        max_output_tokens: Limit of the answer, if there is one.
        response_id: Id of the answer.
        previous_id: Id of the earlier answer that it continues, whose messages it lacks.
        prompt_ids: Packed token ids of the prompt; empty if the log does not say.
        reply_ids: Packed token ids of the reply.
    """

    line: int
    prompt: LoggedPrompt
    model: str = ""
    at_s: float | None = None
    tenant: str = ""
    user: str = ""
    reply: tuple[Block, ...] = ()
    max_output_tokens: int | None = None
    response_id: str = ""
    previous_id: str = ""
    prompt_ids: bytes = b""
    reply_ids: bytes = b""

    @property
    def answer(self) -> str:
        """The text of the reply, calls included."""
        return "".join(block.written for block in self.reply)

    @property
    def body(self) -> dict[str, Any]:
        """The request as chat templates read it: ``prompt``, or ``messages`` and ``tools``."""
        limit = self.max_output_tokens
        extra = {} if limit is None else {"max_tokens": limit}
        return self.prompt.as_template_input() | extra


@dataclass(frozen=True, slots=True)
class RequestLog:
    """A log of requests, in the order of its lines.

    Attributes:
        name: Name of the file.
        requests: In order.
        broken: Records that were skipped.
        is_cut: Whether the log has more requests than were read.
    """

    name: str
    requests: tuple[LoggedRequest, ...]
    broken: tuple[BrokenLine, ...] = ()
    is_cut: bool = False


@dataclass(slots=True)
class LogOptions:
    """How to read a log.

    Attributes:
        on_broken: Whether to stop at an invalid record, or to skip it.
        ignored: Fields of requests that are known not to change the prompt.
        broken: Receives the skipped records.
    """

    on_broken: OnBroken = "refuse"
    ignored: Collection[str] = ()
    broken: list[BrokenLine] = field(default_factory=list)


def read_request_log(
    path: str | Path, options: LogOptions | None = None, max_letters: int | None = None
) -> RequestLog:
    """Read a log of requests into memory; messages that are sent again are held once.

    Args:
        path: The file.
        options: How to read it.
        max_letters: Stop before the prompts are longer than this, all taken together.

    Raises:
        BrokenTrace: A record cannot be read, and is not to be skipped; it is named.
    """
    path, options = Path(path), options or LogOptions()
    requests: list[LoggedRequest] = []
    held: dict[Message, Message] = {}
    num_letters = 0
    for request in iter_requests(path, options):
        num_letters += len(request.prompt.written())
        if max_letters is not None and num_letters > max_letters and requests:
            return RequestLog(path.name, tuple(requests), tuple(options.broken), is_cut=True)
        messages = [held.setdefault(message, message) for message in request.prompt.messages]
        requests.append(replace(request, prompt=request.prompt.with_messages(messages)))
    return RequestLog(path.name, tuple(requests), tuple(options.broken))


def iter_requests(path: Path, options: LogOptions) -> Iterator[LoggedRequest]:
    """Read a log one request at a time, as ``iter_converted`` does."""
    return iter_converted(path, options, lambda request: request)


def iter_converted(
    path: Path, options: LogOptions, convert: Callable[[LoggedRequest], ItemT]
) -> Iterator[ItemT]:
    """Read a log one request at a time, and convert each.

    Args:
        path: The file.
        options: How to read it.
        convert: Called with each request; a ``BrokenTrace`` of it makes the record invalid.

    Raises:
        BrokenTrace: A record cannot be read, and is not to be skipped; it is named.
    """
    earlier = Conversations()

    def parse(number: int, record: bytes) -> list[ItemT]:
        requests = parse_requests(record, number, options.ignored)
        return [convert(earlier.complete(request)) for request in requests]

    for requests in iter_lines(path, parse, options.on_broken, options.broken):
        yield from requests


def parse_requests(
    record: bytes | str, number: int, ignored: Collection[str] = ()
) -> list[LoggedRequest]:
    """Read a record; completions may hold several prompts.

    Raises:
        BrokenTrace: It is no JSON object, there is no request in it, or a field of the request is
            not understood; the field is named.
    """
    return [
        request
        for whole in records_of(_object(record))
        for request in _requests_of(whole, number, ignored)
    ]


def _requests_of(
    whole: dict[str, Any], number: int, ignored: Collection[str]
) -> list[LoggedRequest]:
    """Read the requests of an object around a body."""
    around = envelope.find_body(whole)
    body = around[-1]
    response = envelope.find_response(whole, ignored)
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens",
                                          "max_output_tokens"))  # fmt: skip
    limit = next((n for n in limits if isinstance(n, int) and not isinstance(n, bool)), None)
    metadata = body.get("metadata")
    users = [*around, metadata if isinstance(metadata, dict) else {}]
    is_response = isinstance(response, dict)
    return [
        LoggedRequest(
            number,
            prompt,
            envelope.first_text(around[::-1], ("model", "modelId")),
            envelope.seconds_of(
                next((o[n] for o in around for n in envelope.TIMES if o.get(n) is not None), None)
            ),
            envelope.first_text(around, envelope.TENANTS),
            envelope.first_text(users, (*envelope.USERS, "user_id")),
            read_reply(response) if response else (),
            limit,
            str(response.get("id") or "") if is_response else "",
            str(body.get("previous_response_id") or ""),
            *_token_ids(response if is_response else {}),
        )
        for prompt in read_prompts(body, ignored)
    ]


def _token_ids(response: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the ids of prompt and answer, packed, if a response has those of one choice."""
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return b"", b""
    rows = (response.get("prompt_token_ids") or choices[0].get("prompt_token_ids"),
            choices[0].get("token_ids"))  # fmt: skip
    if not all(isinstance(row, list) for row in rows):
        return b"", b""
    try:
        prompt, reply = (pack_tokens(row or ()).tobytes() for row in rows)
    except TokenOutOfRange as error:
        raise BrokenTrace(f"the response's token ids: {error}") from error
    return prompt, reply


def render_plainly(request: LoggedRequest) -> str:
    """Write a prompt without a model's template."""
    return request.prompt.written()


def filled_times(times: Sequence[float | None]) -> list[float]:
    """Return a time for each request of a log.

    A request without one comes a second after the one before, those before the first that is
    known with it; where none is known, the log begins at 1.
    """
    first = next((place for place, at_s in enumerate(times) if at_s is not None), None)
    if first is None:
        return [float(number) for number in range(1, len(times) + 1)]
    now = times[first] or 0.0
    filled = [now] * first
    for at_s in times[first:]:
        now = now + 1 if at_s is None else at_s
        filled.append(now)
    return filled


class Conversations:
    """Completes requests that name an earlier response instead of sending its messages."""

    MAX_LETTERS = 2**24
    """Letters of conversations that are held for later requests; the oldest are dropped."""

    def __init__(self) -> None:
        """Know no response."""
        self._messages: dict[str, tuple[Message, ...]] = {}
        self._num_letters = 0

    def complete(self, request: LoggedRequest) -> LoggedRequest:
        """Return a request with the messages that it continues.

        Raises:
            BrokenTrace: The log does not hold them.
        """
        prompt, num_leading = request.prompt, request.prompt.num_leading
        messages = prompt.messages
        if request.previous_id:
            earlier = self._messages.get(request.previous_id)
            if earlier is None:
                raise BrokenTrace(
                    f"previous_response_id={request.previous_id!r}: the log holds no earlier "
                    "response with that id, or it is too long ago, so the prompt is not known"
                )
            messages = (*messages[:num_leading], *earlier, *messages[num_leading:])
        if request.response_id and prompt.api == "responses":
            reply = Message("assistant", request.reply, "response")
            self._hold(request.response_id, (*messages[num_leading:], reply))
        return replace(request, prompt=prompt.with_messages(messages))

    def _hold(self, response_id: str, messages: tuple[Message, ...]) -> None:
        self._num_letters -= _num_letters(self._messages.pop(response_id, ()))
        self._messages[response_id] = messages
        self._num_letters += _num_letters(messages)
        while self._num_letters > self.MAX_LETTERS:
            oldest = next(iter(self._messages))
            self._num_letters -= _num_letters(self._messages.pop(oldest))


def _num_letters(messages: Sequence[Message]) -> int:
    return sum(len(block.text) for message in messages for block in message.blocks)


def _object(record: bytes | str) -> dict[str, Any]:
    try:
        whole = envelope.load_json(record)
    except UnicodeDecodeError as error:
        raise BrokenTrace(f"it is not valid UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise BrokenTrace(f"it is no JSON: {error}") from error
    if not isinstance(whole, dict):
        raise BrokenTrace(f"a request must be an object, not {type(whole).__name__}")
    return whole
