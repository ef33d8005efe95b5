"""Embeddings, scores, classes, choices: what a causal model says of a text without continuing it.

A causal model's last hidden state depends on the tokens before it through their keys and values
alone, so a cached prefix gives the same bits as a computed one. A query and its instruction are the
prefix of all documents that are scored against it: each document is one request, and all of them
share that prefix.

Files in reading order:

* ``pooling``: reads how a checkpoint turns hidden states into an embedding
* ``outputs``: what the caller gets, with vLLM's names
* ``pooling_params``: what the caller may set
* ``templates``: writes a query and a document as one prompt
* ``pairs``: tokenizes it, and cuts documents
* ``choices``: the likelihood of given continuations
* ``scorer``: turns texts into requests, and their outputs into numbers

Rules:

1. Every text is a request of its own, and shares its prefix as any other request does.
2. What needs the hidden states of all tokens does not read the cache: those of a cached prefix are
   not kept.
3. Numbers are those of the request alone, whatever else ran beside it.
"""
