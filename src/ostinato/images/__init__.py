"""From an image part of a prompt to its pixels, within limits; no tensors.

Files in reading order:

* ``picture``: decodes images, and names them by their content
* ``media``: fetches the bytes of an image from a data URI, a file or a URL
* ``parts``: finds the images of a conversation

Rules:

1. An image is refused by its size before it is decoded, and by its length before it is read.
2. A data URI is always read; files and URLs only where the operator allows them.
3. The address that is checked is the address that is connected to, after each redirect too.
"""
