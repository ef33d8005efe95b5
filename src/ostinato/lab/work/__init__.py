"""The time of a step, from measured costs or data sheets.

Files in reading order:

* ``kv_groups``: the blocks that fit a given memory, per group of layers
* ``cost_model``: the time of a step, from given or measured costs
* ``model_work``: the work per token: FLOP, bytes of weights and of KV
* ``roofline``: the time of a step on given GPUs
"""
