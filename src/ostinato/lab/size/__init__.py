"""Bytes of KV, states and weights of a model.

Files in reading order:

* ``kv_config``: reads values of a model's config under any of their spellings
* ``kv_states``: the states of Mamba, linear attention and convolutions
* ``kv_patterns``: the type of each layer, and its number of KV heads
* ``kv_families``: default values of each model family
* ``kv_layers``: the KV of each layer, per token
* ``kv_bytes``: bytes of KV per token, per sequence and in all
* ``image_tokens``: the prompt tokens of an image, and its encoder's parameters
* ``quantities``: formats and parses amounts of memory, counts and durations
* ``weights``: the parameters of a model, and of LoRA adapters
* ``gpus``: data sheets of GPUs
"""
