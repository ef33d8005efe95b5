"""How is a server put together from settings?"""

import asyncio
from typing import Any

from ostinato.engine.async_llm import AsyncLLM
from ostinato.server.admin.bodies import PrewarmLine
from ostinato.server.admin.prewarming import prewarm_all
from ostinato.server.callers import KeyedCallers
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from ostinato.server.tracing import make_tracer


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
    tracer = make_tracer(config)  # before the model: what it lacks should be said at once
    if config.keys_file is None:
        state = ServerState(AsyncLLM(model, **settings), config)
    else:
        callers = KeyedCallers(config.keys_file)
        llm = AsyncLLM(model, **settings, allotments=callers.keys.allotments())
        state = ServerState(llm, config, callers)
    if tracer is not None:
        state.observers.append(tracer)
    return state


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
