"""The figures of the live page.

Files in reading order:

* ``figures``: time series of the page: tokens, latencies, queue, memory
* ``state``, ``page``: the data and the files of the page (``static``)
"""
