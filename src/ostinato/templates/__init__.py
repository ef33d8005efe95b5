"""What a chat template does to the turns that it has shown before.

A prefix cache keeps a conversation as long as each prompt begins with the one before and with what
the model wrote. Templates break that: they drop old reasoning, repeat a mark differently, or write
a setting at the top. Synthetic dialogues show which one does what, before the first request.

Files in reading order:

* ``dialogues``: the dialogues, and what they vary
* ``report``: what was lost where, as values, text and JSON
* ``probe``: renders the dialogues and compares each prompt with the one before

Rules:

1. The renderer and the tokenizer are functions that are passed in: nothing here imports tensors.
2. A template may raise anything; a report says so, and raises nothing.
"""
