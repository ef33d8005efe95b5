"""Drafts: tokens that a decode is about to sample, as text already seen has them.

The step computes the model's own token at each drafted position and keeps drafts while they equal
it, so what is drafted here changes the time of an answer and nothing else.

Files in reading order:

* ``ngrams``: positions of a text by the digest of the last 8 or 4 tokens before them
* ``own_text``: the text of one sequence, prompt and output
* ``tree_text``: the text of all cached blocks, by tenant
* ``gain``: how many rows are worth their price
* ``drafter``: looks for drafts, source by source, and learns which are right

Rules:

1. A draft is a guess: any tokens may be proposed, and none changes an answer.
2. A sequence is offered text of its own salt and of the public prefixes that it begins with, and no
   other text: nothing that another tenant sends changes how fast its answers are.
3. A row is computed only if its expected gain is above its measured price.
"""
