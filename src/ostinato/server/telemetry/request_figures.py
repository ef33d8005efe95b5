"""The figures of requests, which the server counts as they happen, and of the server itself."""

from functools import partial

from ostinato.server.telemetry.figures import Figure

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Histogram bounds of latencies."""

GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Histogram bounds of the time between two tokens."""

counter, histogram = partial(Figure, "counter"), partial(Figure, "histogram")

# fmt: off
REQUESTS = counter("requests",
    "Requests that ended, by the finish reason of their first continuation (`stop`, `length` and "
    "so on), or `error`, or `gone` if the client disconnected.", labels=("finish_reason",))
REFUSED = counter("refused_requests",
    "Requests refused at admission, by status: 429 for a full queue or a limit.",
    labels=("status",))
GENERATED = counter("generated_tokens", "Tokens generated for requests that ended.")
BEAMS = counter("beam_tokens", "Those of them that beams were computed for, whichever won.")
ROUTES = counter("route_prompt_tokens",
    "Prompt tokens of requests that ended that hit the cache, or missed it, by route: of scores, "
    "embeddings and choices each text.", labels=("route", "result"))
IGNORED_FIELDS = counter("ignored_fields",
    "Fields of requests that this server does not know, and "
    "[tools left out of prompts](agents.md#fields).", labels=("path",))
SET_ASIDE = counter("set_aside",
    "Texts of prompts that a [constant took the place of](agents.md#volatile-bytes), by the rule "
    "that names them.", labels=("rule",))
LATE_RULES = counter("set_aside_timeouts",
    "Prompts in which a rule was not tried to the end, since it took too long.", labels=("rule",))
FIRST_TOKEN = histogram("time_to_first_token_seconds",
    "Time from a request's arrival to its first token, by the share of its prompt that hit: "
    "`none`, `below_half`, `half_or_more` or, from nine tenths on, `nearly_all`.",
    labels=("hit_share",), bounds=SECONDS)
OUTPUT_GAPS = histogram("inter_token_latency_seconds", "Time between two outputs of a request.",
    bounds=GAPS)
QUEUE = histogram("queue_time_seconds",
    "Time from a request's arrival at the engine to its first step.", bounds=SECONDS)
DURATION = histogram("request_duration_seconds", "Time from a request's arrival to its end.",
    bounds=SECONDS)
HTTP = counter("http_requests",
    "Answers over HTTP, by the template of their route; 499 if the client disconnected first.",
    labels=("method", "route", "status"))
HTTP_TIME = histogram("http_request_duration_seconds",
    "Time from a request over HTTP to its last byte.", labels=("route",), bounds=SECONDS)
BUILD = Figure("info", "build", "Version of Ostinato; always 1.", labels=("version",))
TENANTS = counter("tenant_prompt_tokens",
    "Prompt tokens of a tenant's requests that hit the cache, or missed it.",
    labels=("tenant", "result"))

COUNTED = (
    REQUESTS, REFUSED, GENERATED, BEAMS, ROUTES, IGNORED_FIELDS, SET_ASIDE, LATE_RULES,
    FIRST_TOKEN, OUTPUT_GAPS, QUEUE, DURATION, HTTP, HTTP_TIME,
)
# fmt: on
"""Those that are updated as requests happen."""

FIGURES = (*COUNTED, BUILD, TENANTS)
"""All of them, in the order of the docs."""
