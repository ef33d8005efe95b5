"""HTTP for existing clients: OpenAI's and Anthropic's APIs.

Files in reading order:

* ``answers/``: parses tool calls and reasoning out of what a model writes
* ``config``: server settings
* ``access/``: who calls: keys, tenants, limits of rate and of unread output
* ``call``: a request to the engine, independent of the API
* ``errors``: error responses
* ``telemetry/``: metrics, traces, and usage per tenant
* ``state``: the state of a running server
* ``serving``: runs completions: limits, leases, observers
* ``middleware``: what every request passes: guards, and fields that are not obeyed
* ``routes/``: one file per route
* ``usage``: token counts of a response
* ``streaming``: server-sent events, client disconnects, new parts of outputs
* ``prompting``: turns a conversation with tools into a prompt, and reads its answer
* ``next_prompts``: offers the engine the prompt that will follow an answer
* ``generation``: the common way of requests that generate, whatever their API
* ``scoring``: the common way of requests for embeddings, scores and classes
* ``response_store``: stored responses, for ``previous_response_id``
* ``held_prefixes``: leases of prefixes that clients asked to keep
* ``admin``: routes under ``/admin``, for the administrator alone
* ``page/``: the figures of the live page
* ``app``: builds the application
* ``lifecycle``: starts and drains a server

Rules:

1. Every completion goes through ``serve``, whichever API it came through.
2. The event loop never waits for a forward pass, nor for a tokenizer.
3. A parameter does what it says, or is refused by name; none is ignored.
4. When a client disconnects, its requests are cancelled.
"""
