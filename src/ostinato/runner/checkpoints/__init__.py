"""Checkpoints: their names, folders and files.

Files in reading order:

* ``fetched_models``: models from the package index, and their folder
* ``gguf_file``: opens a GGUF file and checks that it can be loaded
* ``model_resolver``: resolves a model's name to a directory
* ``generation_config``: reads how a checkpoint wants to be sampled
* ``checkpoint``: checks that a checkpoint is complete, and fingerprints its weights
* ``fingerprints``: computes fingerprints beside the load, and remembers them
* ``load_progress``: shows how far the reading of weights is
"""
