"""How is a server put together from settings?"""

import asyncio
from typing import Any

from ostinato.engine.async_llm import AsyncLLM
from ostinato.server.admin.bodies import PrewarmLine
from ostinato.server.admin.prewarming import prewarm_all
from ostinato.server.callers import KeyedCallers
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState


def open_state(model: str, settings: dict[str, Any], config: ServerConfig) -> ServerState:
    """Load a model and return the state of a server that serves it.

    Args:
        model: Embedded model, checkpoint directory or hub name.
        settings: Of the engine, see ``EngineConfig``.
        config: Of the server.

    Raises:
        ConfigError: A setting is out of range, or the keys file is none.
        ModelError: The model cannot be served.
    """
    if config.keys_file is None:
        return ServerState(AsyncLLM(model, **settings), config)
    callers = KeyedCallers(config.keys_file)
    llm = AsyncLLM(model, **settings, allotments=callers.keys.allotments())
    return ServerState(llm, config, callers)


def warm_up(state: ServerState, prompts: list[PrewarmLine]) -> None:
    """Compute prompts before the first request.

    Raises:
        ConfigError: One of them cannot be served or kept; the engine has ended then.
    """
    if not prompts:
        return
    try:
        asyncio.run(prewarm_all(state, prompts))
    except BaseException:
        state.llm.shutdown()
        raise
