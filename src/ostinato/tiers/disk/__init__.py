"""A tier in segments: files on a disk, or host memory.

Files in reading order:

* ``segments``: append-only files of records, and their recovery
* ``index``: finds the records that continue a prefix
* ``limits``: settings of a disk tier, and its daily budget
* ``segment_log``: appends, commits, and evicts segments
* ``health``: read-only and off after faults
* ``tier``: ``DiskTier``
* ``host_memory``: ``MemoryFolder``, a disk tier's segments in memory, below the pool of a GPU
"""

from ostinato.tiers.disk.limits import DiskOptions
from ostinato.tiers.disk.tier import DiskTier

__all__ = ["DiskOptions", "DiskTier"]
