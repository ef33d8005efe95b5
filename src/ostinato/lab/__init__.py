"""Estimates of what caching saves and costs, without a model or an engine.

Files in reading order:

* ``savings``: the tokens that a shared prefix saves
* ``kv_config``: reads values of a model's config under any of their spellings
* ``kv_states``: the states of Mamba, linear attention and convolutions
* ``kv_patterns``: the type of each layer, and its number of KV heads
* ``kv_families``: default values of each model family
* ``kv_layers``: the KV of each layer, per token
* ``kv_bytes``: bytes of KV per token, per sequence and in all
* ``image_tokens``: the prompt tokens of an image, and its encoder's parameters
* ``quantities``: formats and parses amounts of memory, counts and durations
* ``lines``: reads the records of a log: lines of JSON or one JSON array, gzipped or not
* ``recording``: a recorded run
* ``replay``: replays a recorded run and compares its hits
* ``block_trace``: traffic as block ids instead of tokens
* ``trace_builder``: packs requests with named blocks into compact arrays
* ``hash_traces``: reads public traces, which list hashes of blocks instead of tokens
* ``traces``: reads traces of traffic of any kind
* ``policies``: eviction policies for comparison: LFU, SLRU, cost-aware
* ``tier_model``: a simulated disk behind the pool: its contents and load times
* ``serial_replay``: the hits of a cache of a given size and policy on a trace
* ``kv_groups``: the blocks that fit a given memory, per group of layers
* ``cost_model``: the time of a step, from given or measured costs
* ``weights``: the parameters of a model, and of LoRA adapters
* ``model_work``: the work per token: FLOP, bytes of weights and of KV
* ``gpus``: data sheets of GPUs
* ``roofline``: the time of a step on given GPUs
* ``timed_replay``: replays a load in time: TTFT, queues, and occupancy
* ``simulation``: the hits of each policy at each size of the cache, and their upper bound
* ``replicas``: the hits of several replicas, each with a cache of its own
* ``plan``: the number of replicas, and their cache memory, for some traffic
* ``plan_words``: a plan's advice in words
* ``plots``: draws plots
* ``report``: writes plots, tables and text to one HTML page
* ``logged_prompt``: a logged prompt, independent of its API
* ``request_fields``: reads a JSON object strictly: unknown fields are refused
* ``request_parts``: the parts of a message: texts, tool calls and results, reasoning, files
* ``request_formats``: turns the body of a request into a prompt
* ``request_envelope``: finds request, time, tenant and response in a log record
* ``request_spans``: requests in what tracing tools export
* ``request_log``: a log of requests
* ``explain_log``: explains the misses of each request of a log or of a recorded run
* ``word_tokens``: a tokenizer for logs without a model
* ``lint_slots``: classifies what varies in a template: a time, an id, a counter, a name
* ``lint_keys``: writes JSON with its keys in one order
* ``lint_templates``: groups requests by template, and finds what varies in it
* ``lint_rewrites``: rewrites of requests that a sender could make
* ``lint_order``: finds shuffled tools, examples, documents and call ids
* ``lint_history``: finds earlier turns that are resent changed, retokenized, or dropped
* ``lint_remedies``: the list of fixes that a sender could apply
* ``lint_messages``: finds varying text before shared text inside messages
* ``lint_replay``: replays a group of requests, and counts computed tokens
* ``lint_breakpoints``: checks that ``cache_control`` keeps what requests share
* ``lint``: finds what breaks prefixes, and what each fix saves

Rules:

1. Imports no engine, router or torch; the cache and the scheduler are the real ones.
2. A config that is not understood is refused, naming its key; nothing is guessed silently.
"""
