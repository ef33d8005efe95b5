"""Bodies of OpenAI's and Anthropic's APIs: what requests may say, and what responses have.

Files in reading order:

* ``body``: the base class of request bodies
* ``conversation``: messages and tools, independent of the API
* ``marks``: marks up to which a prompt is kept
* ``pattern_limits``, ``volatile``: set aside what clients change in prompts without meaning
* ``sampling``: the fields that completions and chats share
* ``schemas``: closes the objects of JSON schemas
* ``tools``: tools, tool calls and response formats in OpenAI's API
* ``dialects``: fields of each API that have no effect here, and those that are refused
* ``completions``: the body of ``/v1/completions``
* ``chat``: the body of ``/v1/chat/completions``
* ``lark``: grammars of tools as regular expressions
* ``response_tools``: tools and calls of ``/v1/responses``
* ``responses``: the body of ``/v1/responses``
* ``message_blocks``: the blocks of messages of Anthropic's API
* ``messages``: the body of Anthropic's ``/v1/messages``
* ``lenient``: reads bodies that need not be valid, for routers
* ``logprobs``: log-probabilities as OpenAI writes them
* ``answers``: response bodies

Rules:

1. Types are strict: ``"1"``, ``1.0`` and ``true`` are not the number 1.
2. A field that would change the answer and is not supported is refused by name; one that is
   unknown is kept aside and named in the response. Null is the same as leaving a field out.
3. Nothing here knows an engine, a server or HTTP: who reads bodies elsewhere, as router and lab
   do, loads pydantic and no tensors.
"""
