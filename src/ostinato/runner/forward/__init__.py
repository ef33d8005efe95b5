"""Makes a model fast on a CPU without changing its results.

Files in reading order:

* ``codes``: weights in 8 or 4 bits
* ``gguf_codes``: blocks of a GGUF file as codes of ours
* ``quantized``: such a weight packed for the native library, and which layers get one
* ``packed_linear``: a linear layer whose weight is packed
* ``plain_layers``: checks that a linear layer is unmodified, and creates such layers
* ``packing``: packs the weights of a model's layers, and unpacks them
* ``ops``: the operations between the products of a layer, and C structures for their arguments
* ``mixer_records``: what a layer with a state computes between its products
* ``embedding_and_rope``: the embeddings and rotary angles of a step
* ``decoder``: a decoder as a list of operations
* ``stand_ins``: finds out what a module computes by calling it between stand-ins
* ``head_stand_ins``: likewise, what an attention module makes of its projected rows
* ``mixer_stand_ins``: likewise, what a module with a state computes
* ``structure``: describes a model as operations
* ``arena``: buffers of a program
* ``program``: runs operations in one call, or in one between calls in Python, and sets what differs
  between steps
* ``step_operations``: builds the operations of a decoder's steps
* ``fused``: keeps programs and computes steps with them, from ids to logits
* ``weight_refs``: the weights of a model, packed or plain, and how they are replaced

Rules:

1. Results change only by the order of sums; this is checked at load.
2. A row's product has the same bits whatever the other rows, on one instruction set.
3. The model's own modules keep working, including ``state_dict`` and ``load_state_dict``.
4. A weight is in memory once, packed or plain; an embedding tied to the head, twice.
"""
