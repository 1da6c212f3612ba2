"""Access to `/metrics`: the host name of a request, and its token.

A page of another site can reach the port of a metrics endpoint by DNS rebinding. Its requests have
a host name of that site, so the endpoint accepts only names that it knows, and addresses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.addresses import host_of_authority, is_ip, normalized_hosts
from tidemill.common.token_file import TokenFile

if TYPE_CHECKING:
    from tidemill.common.settings import ProcessSettings

HOST_CHARS_SHOWN_MAX: Final = 253  # of a refused name in the answer


class ScrapeRefusal(NamedTuple):
    """The answer to a refused request."""

    status: int
    text: str
    more_head: str = ""


@final
class ScrapeAccess:
    """The check of the requests to one endpoint."""

    def __init__(self, hosts: Collection[str] = (), token: TokenFile | None = None) -> None:
        """`hosts` are accepted besides localhost and addresses; `token` None: none is needed."""
        self._hosts = normalized_hosts(["localhost", *hosts])
        self._token = token

    def find_refusal(self, host: str, authorization: str) -> ScrapeRefusal | None:
        """Return the answer to a request that may not read the metrics; None if it may.

        `host` and `authorization` are its headers, or empty.
        """
        name = host_of_authority(host)
        # No browser omits the header.
        if host and name not in self._hosts and not is_ip(name):
            shown = host[:HOST_CHARS_SHOWN_MAX].encode("ascii", "backslashreplace").decode()
            return ScrapeRefusal(
                421,
                f"the host name {shown!r} is not allowed; use the address of this endpoint, or add"
                " the name to metrics_hosts\n",
            )
        if self._token is not None and not self._token.admits(authorization):
            what = "the token is wrong" if authorization else "no token"
            return ScrapeRefusal(
                401,
                f"{what}; send `Authorization: Bearer` with the token of metrics_token_file\n",
                "WWW-Authenticate: Bearer\r\n",
            )
        return None


def scrape_access_of(settings: ProcessSettings) -> ScrapeAccess:
    """Return the access to the metrics of a process. Raises StartError for an invalid token."""
    file = settings.metrics_token_file
    token = TokenFile(file, setting="metrics_token_file") if file else None
    return ScrapeAccess([settings.metrics_host, *settings.metrics_hosts], token)
