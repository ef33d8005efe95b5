"""Makes a model fast on a CPU without changing its results.

Files in reading order:

* ``codes``: weights in 8 or 4 bits
* ``quantized``: such a weight in tiles, and which layers get one
* ``packed_linear``: a linear layer whose weight is packed
* ``plain_layers``: checks that a layer is unmodified, and may be replaced
* ``packing``: packs the weights of a model's layers, and unpacks them
* ``layer_specs``: parameters of the operations between products
* ``records``: C structures of operations' arguments
* ``ops``: calls the operations between the products of a layer
* ``workspace``: buffers of a step that is not a program
* ``decoder``: recognizes decoders that the fused forward can compute
* ``lora_products``: the low-rank updates that an adapter adds to each product
* ``embedding_and_rope``: the embeddings and rotary angles of a step
* ``arena``: buffers of a program
* ``program``: runs the operations of all layers in one call
* ``steps``: computes a step without Python between its operations
* ``fused``: computes a step with as few passes over memory as possible
* ``weight_refs``: the weights of a model, packed or plain, and how they are replaced
* ``select_forward``: chooses the forward for a model

Rules:

1. Results change only by the order of sums; this is checked at load.
2. A row's product does not depend on the rows beside it, to the bit, on one instruction set.
3. The model's own modules keep working, including ``state_dict`` and ``load_state_dict``.
4. A weight is in memory once, packed or plain; an embedding that is the head as well, twice.
"""
