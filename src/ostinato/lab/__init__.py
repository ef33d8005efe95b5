"""Estimates of what caching saves and costs, without a model or an engine.

Files in reading order:

* ``savings``: the tokens that a shared prefix keeps out of the model
* ``kv_config``: reads what is needed from a model's config, however it is spelled
* ``kv_states``: what a layer without KV keeps instead
* ``kv_patterns``: the type of each layer, and its number of KV heads
* ``kv_families``: what a family assumes where its config is silent
* ``kv_layers``: what each layer keeps of a token
* ``kv_bytes``: bytes of KV per token, per sequence and in all
* ``image_tokens``: the tokens that an image takes in a prompt, by a model's config alone
* ``encoder_weights``: the parameters of an encoder of images
* ``adapter_bytes``: the memory that LoRA adapters take beside the KV
* ``quantities``: writes bytes and counts for people, and reads them again
* ``lines``: reads the records of a log: lines of JSON or one JSON array, gzipped or not
* ``recording``: a recorded trace, once it is read
* ``replay``: replays a recorded run and compares its hits
* ``block_trace``: traffic without its tokens: which blocks each request names
* ``trace_builder``: packs requests with named blocks into compact arrays
* ``hash_traces``: reads public traces, which list hashes of blocks instead of tokens
* ``traces``: reads traces of traffic of any kind
* ``policies``: eviction policies to compare with, which no engine runs
* ``tier_model``: a disk behind the pool: what is on it, and when loads are there
* ``serial_replay``: the hits of a cache of a given size and policy on a trace
* ``kv_groups``: the blocks of a trace that an engine keeps in a given memory
* ``cost_model``: the time of a step, by prices that were given or measured
* ``weights``: the parameters of a model, and those that one token uses
* ``model_work``: what a token costs a model: multiplications, bytes of weights and of KV
* ``gpus``: the figures of GPUs
* ``roofline``: the time of a step on given GPUs
* ``timed_replay``: replays a load in time: first tokens, queues, and who holds the memory
* ``simulation``: the hits of each policy at each size of the cache, and their upper bound
* ``fleet_replay``: replays a load in time on several replicas behind a router
* ``routed_fleet``: our router there
* ``replicas``: the hits of several replicas, each with a cache of its own
* ``plan``: how many replicas, with how much memory for the cache, serve a traffic
* ``plan_words``: a plan's advice in words
* ``plots``: draws the figures
* ``report``: puts figures, tables and words on one page
* ``logged_prompt``: a logged prompt, whichever API it was sent to
* ``request_fields``: reads an object of a request so that no field of it is missed
* ``request_parts``: the parts of a message: texts, tool calls and results, reasoning, files
* ``request_formats``: turns the body of a request into a prompt
* ``request_envelope``: finds request, time, tenant and response in a record of a log
* ``request_log``: a log of requests
* ``explain_log``: explains the misses of each request of a log or of a recorded run
* ``word_tokens``: tokens for when no model is named
* ``lint_slots``: names what changes in one place of a template: a time, an id, a counter, a name
* ``lint_templates``: finds requests made from one template, and what changes in it
* ``lint_rewrites``: rewrites a request as its sender could have written it
* ``lint_tools``: finds tools listed so that prompts do not begin alike
* ``lint_order``: finds what comes in changing order, though any order would do
* ``lint_history``: finds earlier turns that are sent back changed, or not at all
* ``lint_remedies``: what the sender could do so that requests begin alike
* ``lint_messages``: finds what changes inside messages before what requests share
* ``lint_replay``: the tokens that the requests of a group would have computed
* ``lint_drift``: finds turns that missed because earlier answers came back as other tokens
* ``lint_breakpoints``: checks that ``cache_control`` keeps what requests share
* ``lint``: finds what breaks the prefixes of requests, and what mending it saves

Rules:

1. Imports ``core``, ``cache`` and ``sched`` only, and neither torch nor transformers.
2. A config that is not understood is refused by the name of the key at fault; nothing is
   guessed in silence.
"""
