"""One file per route.

Files in reading order:

* ``health``: ``/health`` and ``/ready``
* ``models``: ``/v1/models``, and LoRA adapters loaded over HTTP
* ``completions``: ``/v1/completions``
* ``chat``: ``/v1/chat/completions``
* ``response_items``: turns an answer into the items of a response and the events of its stream
* ``responses``: ``/v1/responses``
* ``messages``: Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``
* ``tokens``: ``/tokenize`` and ``/detokenize``, as vLLM has them
* ``embeddings``: ``/v1/embeddings``, and vLLM's ``/classify``
* ``scores``: ``/v1/score``, ``/v1/rerank`` as Cohere and Jina have it, and ``/v1/choose``
* ``explain``: ``/v1/explain``: why a request's prompt missed
* ``metrics``: Prometheus metrics of the engine and of requests, ``/metrics``
* ``playground``: the page's playground: origins of tokens, and savings
* ``openapi``: ``/openapi.json`` with every status, and ``/docs``
"""
