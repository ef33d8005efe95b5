"""From logits to tokens and log-probabilities.

Files in reading order:

* ``logit_edits``, ``truncation``, ``logprobs``, ``torch_draws``: sampling in torch
* ``randomness``: the random number of each token
* ``sampler``: chooses the next token
* ``readouts``: hidden states and logits that requests read in place of a text
* ``rounding``: measures how far logits move by rounding alone
"""
