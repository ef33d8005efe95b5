"""What programs call: ``LLM``, ``AsyncLLM`` and administration.

Files in reading order:

* ``explain_api``: copies of its counters, explanations of its requests
* ``adapter_api``: loads and unloads adapters between steps
* ``scoring_api``: embeddings, scores and classes of a batch
* ``beam_api``: beam search of a batch
* ``llm``: batches, with a progress bar and Ctrl-C
* ``engine_thread``: the engine's thread, and how event loops talk to it
* ``tokenizer_executor``: tokenizing without blocking the event loop
* ``admin_api``: leases, public prefixes, erasure, new weights, recordings
* ``async_llm``: many callers at once
"""
