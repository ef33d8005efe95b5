"""Builds the application: one router per API; shared state is in ``app.state.server``."""

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

import ostinato
from ostinato.server.admin import erase, kv_events, leases, recording, statistics
from ostinato.server.errors import install_error_handlers
from ostinato.server.middleware import BodyGuard, HostGuard
from ostinato.server.page import page
from ostinato.server.page import state as page_state
from ostinato.server.routes import (
    chat,
    completions,
    embeddings,
    explain,
    health,
    messages,
    metrics,
    models,
    openapi,
    playground,
    responses,
    scores,
    tokens,
)
from ostinato.server.state import ServerState

ROUTERS: list[APIRouter] = [
    module.router
    for module in (
        *(health, models, completions, chat, responses, messages, tokens, explain, metrics),
        *(embeddings, scores),
        *(statistics, leases, erase, kv_events, recording),
        *(playground, page_state, page),  # the page comes last: it matches every name below /ui
    )
]


def create_app(state: ServerState) -> FastAPI:
    """Build an application; the state's engine is running, and the caller shuts it down."""
    app = FastAPI(title="Ostinato", version=ostinato.__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    for router in ROUTERS:
        # Not include_router, which builds each route anew for each application.
        app.router.routes.extend(router.routes)
    openapi.install(app, ROUTERS, has_keys=state.config.keys_file is not None)
    install_error_handlers(app)
    app.add_middleware(BodyGuard, state=state)
    page_state.install(app, state)
    if state.config.keys_file is None:
        app.add_middleware(HostGuard, allowed_origins=state.config.allowed_origins)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    metrics.install(app, state)  # last, so that it is the outermost middleware
    return app
