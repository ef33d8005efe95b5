"""How do clients that already exist reach the cache? OpenAI's API over HTTP.

Files in reading order:

* ``answer_formats``: how do model families write reasoning and calls of tools?
* ``config``: what may be set of a server?
* ``keys``: which keys are there, and what does each tenant get for its own?
* ``callers``: who is calling, and what may they do?
* ``call``: what is asked of the engine, whichever API it came through?
* ``errors``: how does an error look to a client, and what is wrong with a body?
* ``observer``: what may onlookers learn of each request?
* ``accounts``: what is booked for one tenant?
* ``tenant_usage``: what did the cache do for whom?
* ``rate_limit``: has a tenant used up what it may ask for?
* ``state``: what does one server know while it runs?
* ``serving``: which way does every completion take?
* ``guards``: which requests are refused before anything looks at them?
* ``connections``: which connections are kept open?
* ``health``: is the server alive, and does it take requests?
* ``models``: which models are there?
* ``adapters``: which LoRA adapters are loaded and unloaded over HTTP?
* ``protocol``: what do bodies look like? (a folder)
* ``deltas``: what is new since the last look?
* ``streaming``: how does an answer reach a client that may go away at any moment?
* ``answer_parser``: where in an answer are reasoning, text and calls of tools?
* ``tools``: which tools may the model call, and how is it told of them?
* ``call_grammar``: which grammar holds an answer to its form, and its calls to a tool format?
* ``prompting``: how does a conversation with tools become a prompt, and how is its answer read?
* ``completions``: how is a text continued?
* ``chat``: how is a conversation continued?
* ``response_store``: which responses does the server remember?
* ``response_items``: how does an answer become the items of a response?
* ``responses``: how is a conversation continued that the server may remember?
* ``held_prefixes``: which prefixes did clients ask to keep, and are they kept already?
* ``breakpoints``: how much of a prompt do breakpoints cover, and what was kept of it?
* ``messages``: how do Anthropic's clients speak?
* ``tokens``: which tokens is a text made of?
* ``explaining``: why did a request's prompt miss?
* ``engine_watch``: how is the engine looked at without waiting for it?
* ``http_meter``: which answers left the server?
* ``ghost_metrics``, ``tier_metrics``, ``metrics``, ``metrics_page``: what may Prometheus know, and
  where does it scrape?
* ``admin``: what may an operator do over HTTP?
* ``tracing``: where did a request's time go?
* ``playground``: where did each token come from, and what would such prompts save?
* ``page_figures``: which figures of the last minutes does the page show?
* ``page_state``, ``page``: what does the page show, to whom, and where is it? (``static``)
* ``openapi``: what does the server say of itself?
* ``app``: which parts make up the application?
* ``lifecycle``: how does a server begin, and how does it end?

Rules:

1. Every completion goes through ``serve``, whichever API it came through.
2. The event loop never waits for a forward pass, nor for a tokenizer.
3. A parameter does what it says, or is refused by name; none is ignored.
4. A client that goes away takes its requests along.
"""
