"""The defences against pages of other origins: checks of headers, and headers of each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from tidemill.admin.http.sessions import find_cookie, renewed_cookie_of

if TYPE_CHECKING:
    from starlette.types import Message, Scope, Send

API: Final = "/api/"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES: Final = frozenset({"same-origin", "none"})
# Of answers without a policy of their own. JSON needs nothing from other addresses.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": POLICY,
}
STRICT_TRANSPORT: Final = "max-age=31536000"  # one year


def find_foreign_page(scope: Scope) -> str:
    """Return why a request comes from a page of another origin; "" if it does not.

    Browsers send a session with each request, so a request with one must prove its origin.
    """
    headers = Headers(scope=scope)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    has_session = find_cookie(scope) is not None
    if scope["method"] in SAFE_METHODS:
        is_foreign = has_session and site == "cross-site"
        return "pages of another site may not read this API in a session" if is_foreign else ""
    if has_session and origin is None and site is None:
        return "a change in a session needs the header Origin or Sec-Fetch-Site"
    if origin is not None:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return "the header Origin is no address"
        # A proxy in front may end TLS, so an https page may call an http API, but not reversed.
        is_weaker = scope.get("scheme") == "https" and parts.scheme != "https"
        if parts.netloc != headers.get("host") or is_weaker:
            return f"pages of {origin} may not call this API; use a page of the API itself"
    if site is not None and site not in OWN_SITES:
        return f"pages of another site may not call this API (Sec-Fetch-Site: {site})"
    return ""


def with_headers(scope: Scope, send: Send) -> Send:
    """Return `send` with the headers of each answer."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if (cookie := renewed_cookie_of(scope)) and "set-cookie" not in headers:
                headers["Set-Cookie"] = cookie
            if scope["path"].startswith(API):
                headers["Cache-Control"] = "no-store"
            if scope.get("scheme") == "https":
                headers.setdefault("Strict-Transport-Security", STRICT_TRANSPORT)
        await send(message)

    return send_with_headers
