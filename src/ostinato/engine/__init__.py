"""The loop over one model, and its two interfaces: ``LLM`` and ``AsyncLLM``.

Files in reading order:

* ``settings/``: the settings of an engine, their checks, and what derives from them
* ``grammar/``: which tokens may come next under a grammar
* ``requests/``: what a caller asks for and gets: prompts, sampling parameters, outputs
* ``scoring/``: embeddings, scores and classes: requests whose result is no text
* ``ledger/``: what the model wrote, by its place in a conversation, for later prompts
* ``prompts/``: from conversations, texts and images to token ids
* ``text/``: from token ids to text and back, with the places where both may be cut
* ``worker_process``: work that can be killed, and done in turns by tenant
* ``loop/``: the loop: requests in, steps, outputs and events out
* ``tiers/``: loads prefixes from tiers, and writes them there, beside the steps
* ``api/``: what programs call: ``LLM``, ``AsyncLLM`` and administration

Rules:

1. The loop has no I/O and no threads; its interfaces, the event publisher, the tiers, the encoder
   of images and the trace writer bring their own.
2. A request is checked in full before anything of it is added.
3. A failed step ends the requests that took part in it and no others.
4. One call at a time runs in an ``LLM``, in the process that made it.
"""
