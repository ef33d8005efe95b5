"""Describes how steps are computed here, and why not faster.

Created once, when an engine has loaded its model; shown at load, by ``ostinato serve``, in
``/admin/stats`` and in the metrics.
"""

from dataclasses import asdict, dataclass

from ostinato.runner.attention_choice import AttentionCase, attention_in_use, why_torch
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.native.library import (
    ISA_VARIABLE,
    best_isa,
    current_isa,
    library,
    why_missing,
)
from ostinato.runner.settings import AttentionName


@dataclass(frozen=True, slots=True)
class ComputePath:
    """How steps are computed.

    Attributes:
        device: Type of the device.
        dtype: Compute dtype.
        weights: Format of linear layers' weights, such as ``int8 in groups of 128``.
        kv_dtype: Format of keys and values.
        instruction_set: That of the native library, such as ``avx2``; ``none`` without it.
        attention: ``native``, ``triton`` or ``torch``.
        forward: ``fused``, ``packed`` or ``plain``.
        why_not_faster: What prevents the fastest path; empty if nothing does.
    """

    device: str
    dtype: str
    weights: str
    kv_dtype: str
    instruction_set: str
    attention: str
    forward: str
    why_not_faster: str = ""

    @classmethod
    def of(cls, loaded: LoadedModel, name: AttentionName, case: AttentionCase) -> "ComputePath":
        """Describe an engine's path, with the requested attention."""
        used, reason = _instruction_set()
        hindrance = why_torch(name, case)
        in_torch = hindrance and f"attention in torch: {hindrance}"
        reasons = (reason, in_torch, loaded.forward.reason)
        return cls(
            loaded.device.type,
            str(loaded.dtype).removeprefix("torch."),
            loaded.weight_format,
            str(case.kv_dtype).removeprefix("torch."),
            used,
            attention_in_use(name, case),
            loaded.forward.name,
            "; ".join(reason for reason in reasons if reason),
        )

    def fields(self) -> dict[str, str]:
        """Return all attributes by name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return it as one line."""
        why = f" (why not faster: {self.why_not_faster})" if self.why_not_faster else ""
        weights = "" if self.weights == self.dtype else f", weights in {self.weights}"
        kv = "" if self.kv_dtype == self.dtype else f", keys and values in {self.kv_dtype}"
        return (
            f"{self.dtype} on {self.device}{weights}{kv}, instruction set {self.instruction_set}, "
            f"{self.attention} attention, {self.forward} forward{why}"
        )


def _instruction_set() -> tuple[str, str]:
    """Return the instruction set in use, and why it is not the processor's best."""
    native = library()
    if native is None:
        return "none", why_missing() or ""
    used, best = current_isa(native).name.lower(), best_isa(native).name.lower()
    return used, "" if used == best else f"{used} in place of {best}, see {ISA_VARIABLE}"
