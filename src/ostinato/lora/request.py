"""vLLM's module of this name."""

from ostinato.engine.adapters import LoRARequest

__all__ = ["LoRARequest"]
