"""HTTP for existing clients: OpenAI's and Anthropic's APIs.

Files in reading order:

* ``answer_formats``: how model families write reasoning and tool calls
* ``config``: settings of a server
* ``keys``: API keys, and what each tenant gets
* ``callers``: authenticates callers, and says what they may do
* ``call``: a request to the engine, whichever API it came through
* ``errors``: errors as clients see them
* ``observer``: the port of observers: what they learn of each request
* ``accounts``: the books of one tenant
* ``tenant_usage``: what the cache did for each tenant
* ``rate_limit``: limits of requests and tokens per minute
* ``state``: what one server knows while it runs
* ``serving``: the way of every completion through the engine
* ``guards``: refuses requests before anything looks at them
* ``connections``: limits and closes connections
* ``health``: ``/health`` and ``/ready``
* ``models``: ``/v1/models``
* ``adapters``: loads and unloads LoRA adapters over HTTP
* ``protocol``: bodies: of requests as pydantic models, of answers as plain values (a folder)
* ``deltas``: what is new in an output since the last look
* ``streaming``: sends an answer to a client that may go away at any moment
* ``answer_parser``: splits an answer into reasoning, text and tool calls
* ``tools``: the tools that a model may call, and how it is told of them
* ``call_grammar``: the grammar for a response format or a tool format
* ``prompting``: turns a conversation with tools into a prompt, and reads its answer
* ``completions``: ``/v1/completions``
* ``chat``: ``/v1/chat/completions``
* ``response_store``: responses that can be continued
* ``response_items``: turns an answer into the items of a response and the events of its stream
* ``responses``: ``/v1/responses``
* ``held_prefixes``: prefixes that clients asked to keep
* ``breakpoints``: how much of a prompt breakpoints cover, and what was kept of it
* ``messages``: Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``
* ``tokens``: ``/tokenize`` and ``/detokenize``, as vLLM has them
* ``explaining``: explains why a request's prompt missed
* ``engine_watch``: reads the engine's figures without waiting for it
* ``http_meter``: counts the answers that left the server
* ``ghost_metrics``, ``tier_metrics``, ``metrics``, ``metrics_page``: Prometheus metrics, and
  ``/metrics``
* ``admin``: routes under ``/admin``, for the administrator alone
* ``tracing``: spans for OpenTelemetry: where a request's time went
* ``playground``: where each token of a prompt came from, and what such prompts would save
* ``page_figures``: the page's figures of the last minutes: tokens, waits, queue and memory
* ``page_state``, ``page``: what the page shows, and to whom (``static``)
* ``openapi``: ``/openapi.json`` with every status, and ``/docs``
* ``app``: puts the application together
* ``lifecycle``: starts and drains a server

Rules:

1. Every completion goes through ``serve``, whichever API it came through.
2. The event loop never waits for a forward pass, nor for a tokenizer.
3. A parameter does what it says, or is refused by name; none is ignored.
4. A client that goes away takes its requests along.
"""
