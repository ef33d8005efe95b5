"""Drivers of the engines: one file each, run by the Python that has the engine.

Settings that all get: ``threads``, ``kv_tokens`` (room for that many tokens of KV),
``max_model_len``, ``max_num_seqs``; ours get the settings of their variant as well. Everything is
computed and kept in bfloat16.
"""
