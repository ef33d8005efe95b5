"""Parses tool calls and reasoning out of what a model writes.

Files in reading order:

* ``answer_formats``: how model families write reasoning and tool calls
* ``answer_parser``: splits an answer into reasoning, text and tool calls
* ``call_grammar``: the grammar for a response format or a tool format
"""
