"""The figures of the live page.

Files in reading order:

* ``figures``: time series of the page: tokens, latencies, queue, memory
* ``comparison``: hits of plug-ins beside those of the built-in parts
* ``state``, ``page``: the data and the files of the page (``static``)
"""
