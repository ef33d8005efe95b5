"""How is a model made fast on a CPU without computing anything else?

Files in reading order:

* ``packed``: a weight in tiles, and products with it
* ``codes``: how is a weight written in 8 or 4 bits?
* ``quantized``: such a weight in tiles, and which layers get one
* ``packed_linear``: a linear layer whose weight is packed
* ``plain_layers``: is a layer what its class says, so that it may be computed in another way?
* ``packing``: which layers of a model get packed weights?
* ``parts``: what is an operation between products told, besides rows of numbers?
* ``records``: how does the native library see what an operation works on?
* ``ops``: how does Python call what lies between products?
* ``workspace``: buffers for the numbers of a step that is not a program
* ``decoder``: is a model a decoder that the fused forward knows?
* ``lora_products``: which low-rank updates does an adapter bring to each product?
* ``lookups``: where do the vectors and the angles of a step come from?
* ``arena``: buffers for the numbers that a program works on
* ``program``: how are the operations of all layers run by one call?
* ``steps``: how is a step computed without Python between its operations?
* ``fused``: how is a step computed with as few passes over memory as possible?
* ``places``: which weights does a model have, packed or plain?
* ``choose``: which forward does a model get?

Rules:

1. Nothing here changes what a model computes but by the order of sums; it is tried out at load.
2. A row's product does not depend on the rows beside it, to the bit, on one instruction set.
3. The model's own modules go on working, its ``state_dict`` and ``load_state_dict`` included.
4. A weight is in memory once, packed or plain; an embedding that is the head as well, twice.
"""
