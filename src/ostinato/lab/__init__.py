"""What would caching save, and what does it cost? No model is loaded, and no engine runs.

Files in reading order:

* ``savings``: how many tokens does a shared prefix keep out of the model?
* ``kv_config``: how does a config spell what we ask for?
* ``kv_states``: what does a layer without KV keep instead?
* ``kv_heads``: how many KV heads does an attention layer have?
* ``kv_patterns``: which layer of a model is of which type?
* ``kv_families``: what does a family assume where its config is silent?
* ``kv_layers``: what does each layer keep of a token?
* ``kv_bytes``: how many bytes is that, per token, per sequence, in all?
* ``lines``: what becomes of the lines of a file that cannot be read?
* ``recording``: what does a recorded trace hold, once it is read?
* ``replay``: does a recorded run, done again, give the same hits?
* ``block_trace``: what is known of traffic whose tokens nobody wrote down?
* ``traces``: how are traces of traffic read, whoever wrote them?
* ``policies``: eviction policies to compare with, which no engine runs
* ``serial_replay``: what would a cache of a given size and policy have found of a trace?
* ``cost_model``: how long does a step take?
* ``measured_steps``: how long did the steps of a recorded run take?
* ``timed_replay``: how would the load have felt: first tokens, queues, who holds the memory?
* ``bounds``: what could a cache of this size have found, had it known the future?
* ``simulation``: what would each policy have found, at each size of the cache?
* ``plan``: how much memory is worth buying for the cache, and what does it save?
* ``plots``: how do the figures look?
* ``report``: how is it all put on one page?
* ``request_log``: what does a log of requests hold?
* ``explain_log``: why did each request of a log miss, or each of a recorded run?
* ``word_tokens``: what is a token if no model is named?
* ``lint_templates``: which requests are made from one template, and what changes in it?
* ``lint_remedies``: what could be done so that requests begin alike?
* ``lint_messages``: what changes inside messages, before what requests share?
* ``lint_replay``: how many tokens would the requests of a group have computed?
* ``lint``: what breaks the prefixes of these requests, and what would mending it save?

Rules:

1. Imports ``core``, ``cache`` and ``sched`` only, and neither torch nor transformers.
2. A config that is not understood is refused by the name of the key at fault; nothing is
   guessed in silence.
"""
