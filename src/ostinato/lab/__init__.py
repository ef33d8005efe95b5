"""What would caching save, and what does it cost? Arithmetic only: no model is loaded.

Files in reading order:

* ``savings``: how many tokens does a shared prefix keep out of the model?
* ``kv_config``: how does a config spell what we ask for?
* ``kv_states``: what does a layer without KV keep instead?
* ``kv_heads``: how many KV heads does an attention layer have?
* ``kv_patterns``: which layer of a model is of which type?
* ``kv_families``: what does a family assume where its config is silent?
* ``kv_layers``: what does each layer keep of a token?
* ``kv_bytes``: how many bytes is that, per token, per sequence, in all?

Rules:

1. Imports ``core``, ``cache`` and ``sched`` only, and neither torch nor transformers.
2. A config that is not understood is refused by the name of the key at fault; nothing is
   guessed in silence.
"""
