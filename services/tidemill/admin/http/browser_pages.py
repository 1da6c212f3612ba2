"""The pages for a browser: Swagger UI from installed files, and the page of failovers.

`history_page.html` contains no data. It reads the API, and asks the user for the token if needed.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

FILES = Path(fastapi_offline.__file__).parent / "static"
FILES_PATH = "/docs/files"
PAGE = "/docs"
HISTORY_PAGE = "/history"
DOCUMENT = "/openapi.json"
# Load no files from other servers, even if a later version of Swagger UI asks for them. Forbid
# frames, so that another page cannot make the user click buttons of this page.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def add_pages(app: FastAPI) -> None:
    """Serve the pages. `/` redirects to Swagger UI."""
    app.mount(FILES_PATH, StaticFiles(directory=FILES), name="files of the pages")

    @app.get("/", include_in_schema=False)
    async def redirect_to_docs() -> RedirectResponse:
        return RedirectResponse(PAGE)

    @functools.cache
    def rendered() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @app.get(DOCUMENT, include_in_schema=False)
    async def document() -> Response:
        return Response(rendered(), media_type="application/json")

    @app.get(HISTORY_PAGE, include_in_schema=False)
    async def history() -> HTMLResponse:
        return HTMLResponse(history_page(), headers={"Content-Security-Policy": POLICY})

    @app.get(PAGE, include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=DOCUMENT,
            title=app.title,
            swagger_js_url=f"{FILES_PATH}/swagger-ui-bundle.js",
            swagger_css_url=f"{FILES_PATH}/swagger-ui.css",
            swagger_favicon_url=f"{FILES_PATH}/favicon.png",
        )
        page.headers["Content-Security-Policy"] = POLICY
        return page


@functools.cache
def history_page() -> str:
    """Return the page of masters and failovers."""
    return resources.files("tidemill.admin.http").joinpath("history_page.html").read_text("utf-8")
