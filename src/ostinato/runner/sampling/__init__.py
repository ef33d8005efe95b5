"""From logits to tokens and log-probabilities.

Files in reading order:

* ``logit_edits``, ``truncation``, ``logprobs``, ``torch_draws``: sampling in torch
* ``randomness``: the random number of each token
* ``sampler``: chooses the next token
* ``rounding``: measures how far logits move by rounding alone
"""
