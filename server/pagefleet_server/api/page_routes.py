"""The built-in web page: a chat with the model, and live figures. Plain files beside this module, no build step.

The page asks only this server, and its Content-Security-Policy lets it ask nobody else.
"""

from importlib.resources import files
from typing import Final

from aiohttp import web

CONTENT_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
INDEX: Final = "index.html"


def read_page() -> dict[str, tuple[bytes, str]]:
    """File name -> content and its type."""
    page = {}
    for file in files("pagefleet_server.api").joinpath("page").iterdir():
        kind = CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            page[file.name] = (file.read_bytes(), kind)
    return page


PAGE: Final = read_page()


async def get_page(request: web.Request) -> web.Response:
    """The document itself, or one of the files that it names."""
    found = PAGE.get(request.match_info.get("file", INDEX))
    if found is None:
        raise web.HTTPNotFound
    body, kind = found
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
