"""How is a step computed? The only room that holds tensors.

Files in reading order:

* ``settings``: the values of its settings
* ``kv_codes``: how are keys and values kept in 8 bits?
* ``kv_store``: what does a store of keys and values keep, and what may it be asked?
* ``plain_store``: where do they live, if torch is to read them?
* ``native/``: how does Python reach the native library?
* ``layer_groups``: which layers share block tables?
* ``inputs``: how does a plan become arrays?
* ``states/``: how are layers served that carry a state from token to token?
* ``attention/``: how does a query read scattered blocks?
* ``lora``: which rows of a step get which low-rank update?
* ``lora_records``: how is it added to the outputs of a linear layer?
* ``lora_config``: what does an adapter's config ask for, and can that be served?
* ``lora_files``: can an adapter of ``peft`` be served with this model?
* ``model_call``: how is a model called?
* ``vision_families``, ``vision``: how does an image become rows of the model's input?
* ``image_store``: where are the images of live requests, and what was made of them?
* ``image_step``: how is a step with images computed?
* ``forward/``: how is it made fast on a CPU without computing anything else?
* ``model_runner``: how is one step executed?
* ``compute_path``: how are steps computed here, and why not faster?
* ``logit_edits``, ``truncation``, ``randomness``, ``sampler``: which token is next?
* ``logprobs``: how likely was it?
* ``device``: which device does a name mean, and is it there?
* ``fetched_models``: which models are fetched by name, and where are they kept?
* ``gguf_file``: is a GGUF file one that can be loaded?
* ``gguf_codes``: which codes does it have for a model's linear layers?
* ``compressed_codes``: which has a checkpoint of compressed-tensors?
* ``word_codes``: which has one of GPTQ, AWQ, or compressed-tensors with zero points?
* ``resolve``: which directory does a model's name mean?
* ``checkpoint``: are its files whole, and which weights are these?
* ``model_loader``: how does a checkpoint become a model?
* ``support``: which models can be served correctly?
* ``quantization``: may a quantized checkpoint be served, by its config?
* ``row_watch``: does each layer of a quantized checkpoint compute each row by itself?
* ``rounding``: how far do logits move by rounding alone?
* ``probe``: does this one agree with its own attention?
* ``memory``: how many blocks fit?
* ``heap``: who keeps the memory of large temporaries?
* ``huge_pages``: how does memory that every step reads lie in large pages?

Rules:

1. Sees plans, block tables and slots; never the pool, a request's state or the scheduler.
2. A step is one call of the model over one flattened row of tokens.
3. In each layer: write the step's keys and values, run the plan's copies, then read. States are
   loaded before the first layer and saved after the last one.
4. What attention is asked to do and does not know, it refuses; nothing is silently ignored.
5. A step that fails leaves the runner able to run the next one.
"""
