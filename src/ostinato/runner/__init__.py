"""Computes a step: the only room that holds tensors.

Files in reading order:

* ``settings``: the values of its settings
* ``kv/``: keys and values in blocks
* ``native/``: calls into the native library
* ``inputs``: turns a plan into input tensors
* ``states/``: layers with a state: Mamba, linear attention
* ``attention/``: attention over scattered blocks, one file per backend
* ``gpu/``: attention, forwards and whole steps for GPUs, in Triton
* ``attention_choice``: chooses the native library, Triton or plain torch
* ``adapters/``: LoRA adapters: files, weights, and their products
* ``heads``: what the last layer gives: a vocabulary, classes, or nothing
* ``model_call``: calls a model
* ``images/``: runs the encoder of images, and keeps its outputs
* ``experts/``: mixtures of experts as own products
* ``forward/``: makes a model fast on a CPU without changing what it computes
* ``select_forward``: chooses the forward for a model, on a CPU or another device
* ``model_runner``: executes one step
* ``compute_path``: describes how steps are computed here, and why not faster
* ``portable_bits``: refuses models whose logits differ from processor to processor
* ``token_lists``: the lists of sampling parameters, prepared once
* ``sampling/``: from logits to tokens and log-probabilities
* ``checkpoints/``: names, folders and files of checkpoints
* ``loading/``: weights into models, in every format of checkpoints
* ``block_embedding``: an embedding whose rows stay in the blocks of a GGUF file
* ``weight_cache/``: keeps packed weights, and maps them at the next start
* ``loaded_model``: a model that is ready to be served
* ``model_loader``: loads a model, and checks that it can be served correctly
* ``quantization``: checks that a quantized checkpoint computes each token independently
* ``probe``: compares our attention with the model's own before serving
* ``memory``: computes how many blocks fit
* ``memory_share``: the same by a share of a GPU's memory, measured with a step
* ``malloc_tuning``: keeps the memory of large temporaries
* ``huge_pages``: puts memory that every step reads into large pages

Rules:

1. Sees plans, block tables and slots; never the pool, a request's state or the scheduler.
2. A step is one call of the model over one flattened row of tokens.
3. In each layer: write the step's keys and values, run the plan's copies, then read. States are
   loaded before the first layer and saved after the last one.
4. Attention refuses what it does not support; nothing is silently ignored.
5. A step that fails leaves the runner able to run the next one.
6. Importing the room does not import what loads models, ``transformers.modeling_utils``, which
   takes as long as torch itself: its names are imported for type checkers, and read at use.
"""
