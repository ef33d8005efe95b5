"""How do prompts become texts? The loop, and its two faces.

Files in reading order:

* ``vllm_keywords``: what becomes of a program written for vLLM?
* ``config``: what may a user set?
* ``caller``: may this thread and this process call the engine now?
* ``prompts``: what may a prompt be?
* ``chat``: how does a conversation become a prompt?
* ``tokenized_text``: a text with the tokens that stand for it.
* ``text_boundaries``: where can a text be cut so that its parts have the tokens of the whole?
* ``known_texts``: which texts are known with their tokens, and which does a new text begin with?
* ``text_tokenizer``: how does a text become tokens without tokenizing again what is known?
* ``outputs``: what does the caller get?
* ``detokenizer``: how do tokens become text, never half a character?
* ``stop_strings``: has the text reached a stop string?
* ``request_state``: what has one request brought so far?
* ``weights``: which weights change, and do they fit?
* ``kv_events_wire``: how do events look on the wire?
* ``kv_events_publisher``: who sends them?
* ``grammar_vocabulary``: which bytes does each id stand for?
* ``grammar_worker``, ``grammar_check``: does a grammar compile within bounds?
* ``grammar``: which tokens may come next under a grammar?
* ``public_prefixes``: which prefixes are public, and which prompt begins with one?
* ``trace_writer``: how do lines reach a trace's file without holding up the engine?
* ``recorder``: how is what happens to an engine recorded?
* ``requests``: may this request be served, and what is it before it is added?
* ``engine``: how does the loop go round?
* ``snapshot``: what does an engine look like between two steps?
* ``progress``: how far along is a batch, and how much of it was cached?
* ``explaining``: how does a caller learn why a prompt missed?
* ``administration``: what may an operator ask of an engine?
* ``interrupts``: how does Ctrl-C end a batch without tearing the engine?
* ``llm``: how is it used offline?
* ``thread_bridge``: how do an event loop and the engine's thread talk?
* ``engine_thread``: what does the engine's thread do all day?
* ``tenant_queue``: whose work is done next, beside the event loop?
* ``tokenizer_executor``: how are requests and texts made without holding up the event loop?
* ``async_administration``: what may an operator ask of a running engine, from an event loop?
* ``async_llm``: how is it used from an event loop?

Rules:

1. The loop has no I/O and no threads; the faces, the publisher of events and the writer of
   traces bring theirs.
2. A request is checked in full before anything of it is added.
3. A failed step ends the requests that took part in it and no other.
4. One call at a time runs in an ``LLM``, in the process that made it.
"""
