"""Parses tool calls and reasoning out of what a model writes.

Files in reading order:

* ``answer_formats``: how model families write reasoning and tool calls
* ``answer_parser``: splits an answer into reasoning, text and tool calls
* ``tools``: the tools of a request, and how the prompt describes them
* ``call_grammar``: the grammar for a response format or a tool format
"""
