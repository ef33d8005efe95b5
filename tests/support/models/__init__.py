"""Checkpoints, tokenizers, templates and answers for tests.

Files:

* ``checkpoints``, ``model_families``: tiny checkpoints with real configs and random weights
* ``quantized``, ``word_checkpoints``, ``gguf_files``: the same in the formats of quantizers
* ``portable_weights``: the same weights on every system
* ``images``: tiny models for images and text
* ``references``: the models of ``transformers`` that answers are compared with
* ``adapters``: LoRA adapters with random weights
* ``family_table``: the table of model types in ``docs/models.md``
* ``model_pool``: loaded models that one engine after another uses
* ``chat_templates``, ``chat_families``: templates of ten families, and models that write in them
* ``conversations``: conversations with random models
* ``scripted_model``: a served model whose answers are written in advance
* ``real_model``: prompts for a real model, and its answers
"""
