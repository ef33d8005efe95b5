"""The figures of the live page.

Files in reading order:

* ``figures``: time series of the page: tokens, latencies, queue, memory
* ``state``: the data of the page, with hits of plug-ins beside those of the built-in parts
* ``page``: the files of the page (``static``)
"""
