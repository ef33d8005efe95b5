"""The loop over one model, and its two interfaces: ``LLM`` and ``AsyncLLM``.

Files in reading order:

* ``keywords``, ``vllm_keywords``: which of vLLM's keywords are accepted, and what replaces others
* ``settings``, ``setting_checks``: the settings of an engine, and which values are refused
* ``config``: checked settings, and those of cache and scheduler that derive from them
* ``structured_outputs``, ``sampling_params``: what a user sets per request
* ``caller``: refuses calls from a second thread or a forked process
* ``prompts``, ``chat``: from the caller's prompt or conversation to token ids
* ``tokenized_text``: a text with the tokens that stand for it
* ``text_boundaries``: where a text can be cut so that its parts have the tokens of the whole
* ``known_texts``: which texts are known with their tokens, by tenant
* ``worker_process``, ``tenant_queue``: work that can be killed, and done in turns by tenant
* ``image_worker``, ``image_decoder``: decode images within limits
* ``image_prompts``: the images of a prompt, and their places among its tokens
* ``outputs``: what the caller gets
* ``token_table``, ``detokenizer``, ``stop_strings``: from token ids to text, and to its end
* ``request_validation``: tokenizes a prompt and checks a request, before it is added
* ``prepared_params``: prepares sampling parameters, once for all prompts that share them
* ``text_tokenizer``: tokenizes only the part of a text that is not known
* ``request_state``: the tokens, texts and times of one request
* ``prompt_tokenizer``: turns the texts and images of prompts into token ids
* ``setup``: loads the model and sizes its pools
* ``weights``: checks new weights against the model
* ``kv_events_wire``, ``kv_events_publisher``: the format of KV events, and the socket
* ``grammar_vocabulary``, ``grammar_worker``, ``grammar_check``: compile a grammar within limits
* ``grammar``: which tokens may come next under a grammar
* ``public_prefixes``: which prefixes are public, and which prompt begins with one
* ``adapters``: loaded LoRA adapters by name, and unloaded ones until their requests end
* ``request_factory``: makes requests, checked in full, with identities that say who may share KV
* ``trace_writer``, ``recorder``: record what happens to an engine
* ``audit``: recomputes a share of the hits, and compares
* ``tier_threads``: daemon threads for calls of tiers
* ``tier_prefixes``: converts the keys of sequences to the prefixes of tiers
* ``load_note``, ``tier_reader``, ``tier_loads``: load prefixes from tiers into the pool
* ``tier_stores``, ``tier_events``: write prefixes to tiers, and announce what tiers have
* ``tier_erasures``: erase tenants from tiers in the background
* ``tiered_cache``, ``open_tiers``: the tiers of one engine, and how they are opened
* ``image_encoder``: runs the encoder of images beside the steps
* ``waits``: for whose work requests wait
* ``engine``: the loop
* ``snapshot``, ``explain_api``: copies of its counters, explanations of its requests
* ``adapter_api``: loads and unloads adapters between steps
* ``batch``, ``llm``: batches, with a progress bar and Ctrl-C
* ``thread_bridge``, ``engine_thread``: the engine's thread, and how event loops talk to it
* ``tokenizer_executor``: tokenizing without blocking the event loop
* ``admin_api``: leases, public prefixes, erasure, new weights, recordings
* ``async_llm``: many callers at once

Rules:

1. The loop has no I/O and no threads; its interfaces, the event publisher, the tiers, the encoder
   of images and the trace writer bring their own.
2. A request is checked in full before anything of it is added.
3. A failed step ends the requests that took part in it and no others.
4. One call at a time runs in an ``LLM``, in the process that made it.
"""
