"""What a caller asks for and gets: prompts, sampling parameters, outputs.

Files in reading order:

* ``sampling_params``: what a user sets per request, and what holds where one is silent
* ``read_defaults``: reads those defaults, of the checkpoint and the operator
* ``caller``: refuses calls from a second thread or a forked process
* ``prompts``: from the caller's prompt or conversation to token ids
* ``tenant_queue``: work that can be killed, and done in turns by tenant
* ``outputs``: what the caller gets
* ``request_validation``: tokenizes a prompt and checks a request, before it is added
* ``scored_prompts``: log-probabilities of the last prompts that were scored as a whole
* ``request_state``: the tokens, texts and times of one request
"""
