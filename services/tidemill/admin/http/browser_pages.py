"""The page of the API for a browser: Swagger UI from installed files.

The page contains no data. It reads the API with the session of the browser, or with credentials
that the user enters. The policy of `browser_defences.py` forbids inline scripts and styles, and
files of other servers. So the page loads its files from this process.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Final

import fastapi_offline
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

FILES: Final = Path(fastapi_offline.__file__).parent / "static"
OWN_FILES: Final = ("tidemill.admin.http", "pages")
FILES_PATH: Final = "/docs/files"
PAGE: Final = "/docs"
DOCUMENT: Final = "/openapi.json"


def add_pages(app: FastAPI) -> None:
    """Serve the page and the OpenAPI document."""
    files = StaticFiles(directory=FILES, packages=[OWN_FILES])
    app.mount(FILES_PATH, files, name="files of the pages")

    @functools.cache
    def rendered() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @app.get(DOCUMENT, include_in_schema=False)
    async def document() -> Response:
        return Response(rendered(), media_type="application/json")

    @app.get(PAGE, include_in_schema=False)
    async def docs() -> HTMLResponse:
        package, folder = OWN_FILES
        page = resources.files(package).joinpath(folder, "docs.html")
        return HTMLResponse(page.read_text("utf-8"))
