"""What would caching save, and what does it cost? No model is loaded, and no engine runs.

Files in reading order:

* ``savings``: how many tokens does a shared prefix keep out of the model?
* ``kv_config``: how does a config spell what we ask for?
* ``kv_states``: what does a layer without KV keep instead?
* ``kv_patterns``: of which type is each layer, and how many KV heads does it have?
* ``kv_families``: what does a family assume where its config is silent?
* ``kv_layers``: what does each layer keep of a token?
* ``kv_bytes``: how many bytes is that, per token, per sequence, in all?
* ``image_tokens``: how many tokens does an image take in a prompt?
* ``encoder_weights``: how many parameters has the encoder of images?
* ``adapter_bytes``: how much memory do LoRA adapters take beside the KV?
* ``quantities``: how are bytes and counts written for people, and read again?
* ``lines``: how are the records of a log read: lines of JSON or one JSON array, gzipped or not?
* ``recording``: what does a recorded trace hold, once it is read?
* ``replay``: does a recorded run, done again, give the same hits?
* ``block_trace``: what is known of traffic without its tokens?
* ``trace_builder``: how do requests with named blocks become compact arrays?
* ``hash_traces``: how are public traces read, which list the hashes of blocks instead of tokens?
* ``traces``: how are traces of traffic read?
* ``policies``: eviction policies to compare with, which no engine runs
* ``tier_model``: a disk behind the pool: what is on it, and when loads are there
* ``serial_replay``: what would a cache of a given size and policy have found of a trace?
* ``kv_groups``: how many blocks of a trace does an engine keep in so much memory?
* ``cost_model``: how long does a step take, by prices that were given or measured?
* ``weights``: how many parameters does a model have, and through how many does a token go?
* ``model_work``: what does a token cost a model: multiplications, bytes of weights and bytes of KV?
* ``gpus``: what can a GPU do?
* ``roofline``: how long does a step take on given GPUs?
* ``timed_replay``: how would the load have felt: first tokens, queues, who holds the memory?
* ``simulation``: what would each policy have found, at each size of the cache, and what could none
  exceed?
* ``fleet_replay``: how would the load have felt on several replicas behind a router?
* ``routed_fleet``: our router there
* ``replicas``: what do several replicas find, each with a cache of its own?
* ``plan``: how many replicas serve this traffic, with how much memory for the cache in each?
* ``plan_words``: what does a plan advise, in words?
* ``plots``: how do the figures look?
* ``report``: how is it all put on one page?
* ``logged_prompt``: what is a logged prompt, whichever API it was sent to?
* ``request_fields``: how is an object of a request read, so that no field of it is missed?
* ``request_parts``: what is a message made of?
* ``request_formats``: how does the body of a request become a prompt?
* ``request_envelope``: where in a record of a log are the request, its time, its tenant and
  its response?
* ``request_log``: what does a log of requests hold?
* ``explain_log``: why did each request of a log miss, or each of a recorded run?
* ``word_tokens``: what is a token if no model is named?
* ``lint_slots``: what changes in one place of a template: a time, a date, an id, a counter, a name?
* ``lint_templates``: which requests are made from one template, and what changes in it?
* ``lint_rewrites``: how is a request rewritten as its sender could have written it?
* ``lint_tools``: how should tools be listed so that prompts begin alike?
* ``lint_order``: what comes in changing order, though any order would do?
* ``lint_history``: which earlier turns are sent back in another form than they had, or no
  longer at all?
* ``lint_remedies``: what could the sender do so that requests begin alike?
* ``lint_messages``: what changes inside messages, before what requests share?
* ``lint_replay``: how many tokens would the requests of a group have computed?
* ``lint_drift``: which turns missed because earlier answers came back as other tokens than were
  generated?
* ``lint_breakpoints``: is ``cache_control`` where it keeps what requests share?
* ``lint``: what breaks the prefixes of these requests, and what would fixing it save?

Rules:

1. Imports ``core``, ``cache`` and ``sched`` only, and neither torch nor transformers.
2. A config that is not understood is refused by the name of the key at fault; nothing is
   guessed in silence.
"""
