"""How is a server put together from settings?"""

from typing import Any

from ostinato.engine.async_llm import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState


def open_state(model: str, settings: dict[str, Any], config: ServerConfig) -> ServerState:
    """Load a model and return the state of a server that serves it.

    Args:
        model: Embedded model, checkpoint directory or hub name.
        settings: Of the engine, see ``EngineConfig``.
        config: Of the server.

    Raises:
        ConfigError: A setting is out of range.
        ModelError: The model cannot be served.
    """
    return ServerState(AsyncLLM(model, **settings), config)
