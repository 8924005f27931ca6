"""The page of the gateway, on which people talk to a pipeline and watch its stages."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

router = APIRouter()

_FOLDER = Path(__file__).parents[1] / "page"
_INDEX, _ASSETS = StaticFiles(directory=_FOLDER), StaticFiles(directory=_FOLDER / "assets")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    # A browser keeps the files, and asks with their ETag whether they have changed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
async def read_page(request: Request) -> Response:
    """Returns the page."""
    return await _read(_INDEX, "index.html", request)


@router.get("/assets/{name}")
async def read_asset(name: str, request: Request) -> Response:
    """Returns a script, a style sheet or an image of the page."""
    return await _read(_ASSETS, name, request)


async def _read(files: StaticFiles, name: str, request: Request) -> Response:
    response = await files.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response
