"""What each lab's file has to do: a module per lab, with a list ``CHECKS``.

* ``blocks``, ``radix``, ``eviction``, ``tails``: the cache
* ``step``: the scheduler
* ``read_once``: attention
* ``router``, ``explain``: choosing a worker, and explaining misses
"""
