"""Bodies: of requests as pydantic models, of answers as plain values.

Files in reading order:

* ``body``: what every body has in common
* ``sampling``: the fields that completions and chats share
* ``tools``: tools, tool calls and response formats in OpenAI's API
* ``completions``: the body of ``/v1/completions``
* ``chat``: the body of ``/v1/chat/completions``
* ``responses``: the body of ``/v1/responses``: text, streams and tools that are functions
* ``messages``: the body of Anthropic's ``/v1/messages``
* ``answers``: bodies of answers, for the description of the API
* ``logprobs``: log-probabilities as OpenAI writes them
* ``answers``: the bodies of answers
* ``usage``: how many tokens it was, and how many of them were cached

Rules:

1. Types are strict: ``"1"``, ``1.0`` and ``true`` are not the number 1.
2. A field that is not listed is refused by its name; null is the same as leaving a field out.
"""
