"""The session of a browser: a page passes the renewed cookie of the API on."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
from fastapi import FastAPI

from tidemill.admin.console.routes import add_console
from tidemill.admin.http.live import LiveViews

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

RENEWED = "tidemill-session=new; Path=/; HttpOnly; SameSite=Strict"


async def api(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer every call with a session and a renewed cookie."""
    headers = [(b"content-type", b"application/json"), (b"set-cookie", RENEWED.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"mode": "on"}).encode()})


def test_a_page_renews_the_session() -> None:
    app = FastAPI()
    app.state.api, app.state.live_views = api, LiveViews()
    add_console(app)

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
            page = await browser.get("/ui/messages")
        assert page.status_code == 200
        assert page.headers["set-cookie"] == RENEWED

    asyncio.run(main())
