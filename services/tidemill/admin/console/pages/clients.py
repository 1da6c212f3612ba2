"""Connected clients: the list, one client, and the end of its connections."""

from __future__ import annotations

from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field
from tidemill.admin.console.page import Page, PageCall, Values, url
from tidemill.admin.http.rest_calls import Document

ROWS: Final = 50  # per page


async def load_clients(call: PageCall) -> Values:
    """Read a page of clients."""
    kept = {name: call.get(name) for name in ("group", "topic", "namespace")}
    found = await call.api.get("/clients", pageSize=ROWS, pageToken=call.get("pageToken"), **kept)
    token = found.get("nextPageToken")
    return {
        "clients": found["clients"],
        "filter": {name: text or "" for name, text in kept.items()},
        "unreachable": found.get("unreachable", []),
        "next": url("/clients", pageToken=token, **kept) if token else "",
    }


async def load_client(call: PageCall) -> Values:
    """Read one client."""
    client = await call.api.get(f"/clients/{call.path['client_id']}")
    return {"client": client, "unreachable": client.get("unreachable", [])}


def _kicked(found: Document) -> Rows:
    return [
        (proxy["name"], f"{proxy['streams']} streams and {proxy['polls']} polls end")
        for proxy in found["proxies"]
    ]


PAGES: Final = (
    Page("/clients", "clients", load_clients),
    Page("/clients/{client_id}", "client", load_client),
)
ACTIONS: Final = (
    PageAction(
        path="/clients/{client_id}/kick",
        method="POST",
        rest="/clients/{client_id}:kick",
        title="Kick {client_id}",
        about="Ends the polls of the client and gives its deliveries back. It may connect again.",
        back="/clients",
        fields=(Field("user", "Only of this user", is_query=True),),
        rows=_kicked,
        button=lambda _found, path: f"Kick {path['client_id']}",
    ),
)
