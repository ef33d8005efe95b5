"""The attention backend of GPUs, behind the interfaces of ``attention.backend``."""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.runner.attention.backend import AttentionBackend, CallsModel
from ostinato.runner.gpu.attention_step import TritonKVStore, TritonStep
from ostinato.runner.gpu.device_steps import DeviceSteps
from ostinato.runner.gpu.read_planner import ReadPlanner
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.settings import ReadOnce

_SHARE: dict[ReadOnce, bool | None] = {"auto": None, "always": True, "never": False}


@dataclass(frozen=True, slots=True)
class TritonAttention(AttentionBackend):
    """Reads blocks in place, shared ones once.

    Attributes:
        read_once: When blocks that sequences share are read once for all of them.
        same_bits: Whether a row's bits depend on its own sequence alone.
    """

    read_once: ReadOnce = "auto"
    same_bits: bool = False

    new_store = staticmethod(TritonKVStore)
    """Makes a store; see ``AttentionBackend``."""

    def start(self, metadata: AttentionMetadata, store: KVStore) -> TritonStep:
        """Begin a step; see ``AttentionBackend``."""
        assert isinstance(store, TritonKVStore), "a store of its own"
        return TritonStep(metadata, store, self._planner())

    def whole_steps(
        self, call: CallsModel, stores: Sequence[KVStore], of_layer: tuple[int, ...]
    ) -> DeviceSteps:
        """Return what computes whole steps; see ``AttentionBackend``."""
        return DeviceSteps(call, stores, of_layer, self._planner())

    def _planner(self) -> ReadPlanner:
        return ReadPlanner(_SHARE[self.read_once], self.same_bits)
