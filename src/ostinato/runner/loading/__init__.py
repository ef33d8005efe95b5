"""Loads weights into models, in every format of checkpoints.

Files in reading order:

* ``model_support``: checks that a model can be served correctly
* ``pretrained``: reads config, weights and tokenizer with ``transformers``
* ``weight_source``: weights of a checkpoint, read from its files one by one
* ``merged_experts``: the experts of a layer as one weight
* ``mxfp4_source``: weights of gpt-oss as published, with experts in MXFP4
* ``fp8_source``: weights in FP8, which become plain numbers
* ``gguf_source``: the weights of a GGUF file, read one by one under the names of the model
* ``word_codes``: how GPTQ, AWQ and compressed-tensors store codes
* ``word_source``: their weights, read one by one
* ``load_memory``: checks that a model fits in free memory before its weights are read
* ``skeleton``: models without weights
* ``streamed``: loads a model weight by weight
"""
