"""Computes a step: the only room that holds tensors.

Files in reading order:

* ``settings``: the values of its settings
* ``kv_codes``: keys and values in 8 bits
* ``kv_store``: the interface of a store of keys and values
* ``plain_store``: a store that torch reads
* ``block_copies``: copies of blocks between a store and host memory
* ``native/``: calls into the native library
* ``layer_groups``: which layers share block tables
* ``inputs``: turns a plan into arrays
* ``states/``: layers that carry a state from token to token
* ``attention/``: attention over scattered blocks, one file per backend
* ``lora``: which rows of a step get which low-rank update
* ``lora_records``: adds it to the outputs of a linear layer
* ``lora_config``: reads the config of an adapter, and refuses what cannot be served
* ``lora_files``: reads an adapter of ``peft`` and checks that it fits the model
* ``model_call``: calls a model
* ``vision_families``, ``vision``: turn an image into rows of the model's input
* ``image_store``: the images of live requests, and what the encoder made of them
* ``image_step``: computes a step with images
* ``forward/``: makes a model fast on a CPU without changing what it computes
* ``model_runner``: executes one step
* ``compute_path``: how steps are computed on this machine, and why not faster
* ``logit_edits``, ``truncation``, ``randomness``, ``sampler``: choose the next token
* ``logprobs``: log-probabilities of tokens
* ``device``: finds the device that a name means, and checks that it is there
* ``fetched_models``: models that are fetched by name, and where they are kept
* ``gguf_file``: opens a GGUF file and checks that it can be loaded
* ``gguf_codes``: the codes of a GGUF file for a model's linear layers
* ``compressed_codes``: the codes of a compressed-tensors checkpoint for a model's linear layers
* ``word_codes``: those of GPTQ, AWQ, or compressed-tensors with zero points
* ``resolve``: finds the directory that a model's name means
* ``checkpoint``: checks that a checkpoint's files are whole, and fingerprints its weights
* ``pretrained``: reads config, weights and tokenizer with ``transformers``
* ``model_loader``: loads a model, and makes sure that it can be served correctly
* ``support``: checks that a model can be served correctly
* ``quantization``: checks that a quantized checkpoint computes each token by itself
* ``row_watch``: checks that each layer of a quantized checkpoint computes each row by itself
* ``rounding``: measures how far logits move by rounding alone
* ``probe``: compares a model with its own attention before it is served
* ``memory``: how many blocks fit
* ``heap``: keeps the memory of large temporaries
* ``huge_pages``: puts memory that every step reads into large pages

Rules:

1. Sees plans, block tables and slots; never the pool, a request's state or the scheduler.
2. A step is one call of the model over one flattened row of tokens.
3. In each layer: write the step's keys and values, run the plan's copies, then read. States are
   loaded before the first layer and saved after the last one.
4. What attention is asked to do and does not know, it refuses; nothing is silently ignored.
5. A step that fails leaves the runner able to run the next one.
"""
