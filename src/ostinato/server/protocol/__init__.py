"""What do bodies look like? Of requests as pydantic models, of answers as plain values.

Files in reading order:

* ``body``: what holds for every body?
* ``sampling``: which fields do completions and chats share?
* ``tools``: how are tools, calls of them and formats of answers written in OpenAI's API?
* ``completions``: what may be asked of ``/v1/completions``?
* ``chat``: what may be asked of ``/v1/chat/completions``?
* ``responses``: what may be asked of ``/v1/responses``?
* ``messages``: what may be asked of Anthropic's ``/v1/messages``?
* ``answers``: what do answers look like, for the description of the API?
* ``logprobs``: how are log-probabilities written?
* ``usage``: how many tokens was it, and how many of them were cached?

Rules:

1. Types are strict: ``"1"``, ``1.0`` and ``true`` are not the number 1.
2. A field that is not listed is refused by its name; null is the same as leaving a field out.
"""
