"""Records traffic without its content.

A trace for the lab has salted digests, lengths and times. The caller names the file; its folder is
a server setting.
"""

from pathlib import Path

from fastapi import APIRouter
from pydantic import Field

from ostinato.protocol.body import Body
from ostinato.server.access.callers import ADMIN_ONLY
from ostinato.server.errors import ApiError
from ostinato.server.state import StateDep

router = APIRouter(prefix="/admin", tags=["administration"], dependencies=ADMIN_ONLY)


class RecordBody(Body):
    """The name of a recording."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="File in the server's folder."
    )


@router.post("/record/start")
async def start_recording(body: RecordBody, state: StateDep) -> dict[str, str]:
    """Record the traffic from now on.

    Raises:
        ApiError: The server was started without a folder for traces (409).
    """
    if state.config.traces_folder is None:
        raise ApiError(
            409, "this server has no folder for traces: start it with --traces-folder FOLDER"
        )
    path = await state.llm.start_recording(Path(state.config.traces_folder) / body.name)
    return {"path": str(path)}


@router.post("/record/stop")
async def stop_recording(state: StateDep) -> dict[str, str]:
    """Stop recording, and return the trace's path.

    Raises:
        ApiError: Nothing is being recorded (409).
    """
    path = await state.llm.stop_recording()
    if path is None:
        raise ApiError(409, "nothing is being recorded")
    return {"path": str(path)}
