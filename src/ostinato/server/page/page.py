"""The page's files and its content security policy.

Plain files in the package: no build, no third-party code, nothing loaded from elsewhere. The policy
forbids everything that the page does not need, inline scripts and styles above all. The files hold
no data; what they show comes from ``/ui/state``, which requires a key.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

from ostinato.server.errors import ApiError

router = APIRouter(include_in_schema=False)

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@router.head("/", include_in_schema=False)
@router.get("/", response_class=Response)
async def page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/ui/{name}", response_class=Response)
async def page_file(name: str) -> Response:
    """Return a file of the page.

    Raises:
        ApiError: There is no such file (404).
    """
    if name not in file_names():
        raise ApiError(404, f"GET /ui/{name:.100}: the page has no such file", code="unknown_url")
    return _file(name)


@cache
def file_names() -> frozenset[str]:
    """Return the names of all files of the page."""
    return frozenset(entry.name for entry in files("ostinato.server").joinpath("static").iterdir())


@cache
def _read(name: str) -> str:
    return files("ostinato.server").joinpath("static", name).read_text("utf-8")


def _file(name: str) -> Response:
    kind = TYPES[name.rpartition(".")[2]]
    return Response(_read(name), media_type=f"{kind}; charset=utf-8", headers=HEADERS)
