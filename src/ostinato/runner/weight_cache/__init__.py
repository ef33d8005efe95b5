"""Keeps packed weights in the user's cache folder, so that a second start maps them.

Files in reading order:

* ``folder``: the folder: who may write to it, what is in it, and what is evicted
* ``entry``: one model's packed weights: their file, how it is written, checked and read
* ``decoder_record``: what the fused forward computes, so that a start needs no modules
* ``facts``: on what packed weights depend, and what the probe learned about them
* ``recording``: writes an entry while a model is packed
* ``restoring``: builds a model from an entry
* ``cache``: finds and keeps the entry of one checkpoint

Rules:

1. An entry is complete or absent: it is written beside the others and renamed as the last step.
2. Without the cache everything works as with it, only slower: a folder that cannot be written to, a
   full disk or a damaged entry costs a line in the log.
3. Weights are mapped privately: replacing them in one process changes neither the file nor another
   process.
4. A file whose size, inode and times are those that were written is trusted, as a checkpoint's
   fingerprint is; any other is compared with its checksums first.
"""
