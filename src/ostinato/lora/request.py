"""vLLM's module of this name."""

from ostinato.engine.loop.adapters import LoRARequest

__all__ = ["LoRARequest"]
