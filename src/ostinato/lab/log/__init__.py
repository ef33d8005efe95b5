"""Reads logs of requests.

Files in reading order:

* ``lines``: reads the records of a log: lines of JSON or one JSON array, gzipped or not
* ``logged_prompt``: a logged prompt, independent of its API
* ``request_fields``: reads a JSON object strictly: unknown fields are refused
* ``request_parts``: the parts of a message: texts, tool calls and results, reasoning, files
* ``request_formats``: turns the body of a request into a prompt
* ``request_envelope``: finds request, time, tenant and response in a log record
* ``request_spans``: requests in what tracing tools export
* ``request_log``: a log of requests
"""
