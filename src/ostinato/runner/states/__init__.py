"""Layers that carry a state from token to token.

Files in reading order:

* ``store``: the states of recurrent layers between steps
* ``recurrence``: the interface of a function that carries a state
* ``recurrences``: the functions of ``transformers`` that carry a state, and how they are called
* ``step``: turns one row of tokens into calls per sequence
* ``mixers``: makes a model's layers with a state compute each sequence by itself
"""
