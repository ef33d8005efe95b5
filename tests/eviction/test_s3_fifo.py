"""In which of S3-FIFO's queues a block is, and where."""

from array import array

from ostinato.ghost.sampler import SampledRequest
from ostinato.ghost.simulated_cache import PolicySimulation


def test_what_others_build_on_goes_on_in_s3fifo_s_main_queue():
    """1 comes up before 4 while 2 builds on it, so it comes behind 5 when 2 is evicted.

    If it had kept its place, it would be evicted as soon as nothing builds on it, and so
    would the whole conversation.
    """
    cache = PolicySimulation(8, "s3fifo")

    def serve(*names: int) -> int:
        return cache.serve(SampledRequest(array("I", names), len(names), 0.0))

    for path in ([1], [4], [1, 2], [5]):
        serve(*path)
        serve(*path)
    for name in range(10, 15):  # used once: when they come up, the others are promoted
        serve(name)
    serve(*range(20, 27))  # takes the room of all that was used once, and of 4, 2 and 5
    cache.check()
    assert [serve(5), serve(1)] == [0, 1]
