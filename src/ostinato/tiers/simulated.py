"""Earlier place of ``ostinato.testing.simulated_disk``, for one release: use that in new code."""

from ostinato.testing.simulated_disk import Faults, Killed, SimulatedFile, SimulatedFolder

__all__ = ["Faults", "Killed", "SimulatedFile", "SimulatedFolder"]
