"""HTTP for existing clients: OpenAI's and Anthropic's APIs.

Files in reading order:

* ``answer_formats``: how model families write reasoning and tool calls
* ``config``: server settings
* ``keys``: the keys file: API keys, quotas and limits of tenants
* ``callers``: authenticates callers, and holds their permissions
* ``call``: a request to the engine, independent of the API
* ``errors``: error responses
* ``observer``: the port of request observers
* ``accounts``: usage counters of one tenant
* ``tenant_usage``: usage counters of all tenants
* ``rate_limit``: limits of requests and tokens per minute
* ``engine_watch``: reads engine counters without waiting for a long step
* ``state``: the state of a running server
* ``serving``: runs completions: limits, leases, observers
* ``guards``: middleware that refuses requests before they are parsed
* ``unread_output``: output that clients have not taken, bounded
* ``http_parts``: counts the pieces of bodies, and closes connections in good order
* ``connections``: limits and closes connections
* ``health``: ``/health`` and ``/ready``
* ``fields``: fields of requests that are not obeyed: named in a header, counted, or refused
* ``models``: ``/v1/models``, and LoRA adapters loaded over HTTP
* ``protocol``: bodies: of requests as pydantic models, of answers as plain values (a folder)
* ``streaming``: server-sent events, client disconnects, new parts of outputs
* ``answer_parser``: splits an answer into reasoning, text and tool calls
* ``tools``: the tools of a request, and how the prompt describes them
* ``call_grammar``: the grammar for a response format or a tool format
* ``prompting``: turns a conversation with tools into a prompt, and reads its answer
* ``completions``: ``/v1/completions``
* ``chat``: ``/v1/chat/completions``
* ``response_store``: stored responses, for ``previous_response_id``
* ``response_items``: turns an answer into the items of a response and the events of its stream
* ``responses``: ``/v1/responses``
* ``held_prefixes``: leases of prefixes that clients asked to keep
* ``breakpoints``: ``cache_control``: the tokens it covers, and those kept
* ``messages``: Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``
* ``tokens``: ``/tokenize`` and ``/detokenize``, as vLLM has them
* ``explain``: ``/v1/explain``: why a request's prompt missed
* ``engine_metrics``, ``metrics``: Prometheus metrics of the engine and of requests, ``/metrics``
* ``admin``: routes under ``/admin``, for the administrator alone
* ``tracing``: OpenTelemetry spans
* ``playground``: the page's playground: origins of tokens, and savings
* ``page_figures``: time series of the page: tokens, latencies, queue, memory
* ``page_state``, ``page``: the data and the files of the page (``static``)
* ``openapi``: ``/openapi.json`` with every status, and ``/docs``
* ``app``: builds the application
* ``lifecycle``: starts and drains a server

Rules:

1. Every completion goes through ``serve``, whichever API it came through.
2. The event loop never waits for a forward pass, nor for a tokenizer.
3. A parameter does what it says, or is refused by name; none is ignored.
4. When a client disconnects, its requests are cancelled.
"""
