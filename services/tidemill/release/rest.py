"""The REST API as the jobs of a release call it: patiently, since its processes are starting."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

TIMEOUT_S: Final = 10.0  # of one call; the admin process gives up on a broker sooner
# After the token's Secret has changed, an admin process has the old one until its node has looked
# again, which takes a minute and a half at most; a job starts with the new one.
TOKEN_EXCHANGE_S: Final = 120.0
PAUSE_S: Final = 0.5  # between two tries: a process is up within a second or two
# What an admin process answers that has not found its brokers yet, or a balancer in front of it.
NOT_YET: Final = frozenset(
    (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
)

Json = Any  # What json.loads returns: a foreign edge.


class Refused(Exception):
    """The API refuses, and would again."""


class Unreachable(Exception):
    """Nobody answered in time."""


class Rest:
    """The REST API of a release."""

    def __init__(self, client: httpx.Client, *, patience_s: float) -> None:
        """Try for `patience_s` in all, from now on."""
        self._client = client
        now_s = time.monotonic()
        self._until_s = now_s + patience_s
        # A wrong token is told sooner than what may take as long as the whole of the patience.
        self._token_until_s = now_s + min(patience_s, TOKEN_EXCHANGE_S)

    @classmethod
    def at(cls, url: str, *, token: str, ca_file: Path | None, patience_s: float) -> Rest:
        """Return the API at an address, with what it asks callers for."""
        headers = {"Tidemill-User": "helm"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        trust = ssl.create_default_context(cafile=ca_file) if ca_file else True
        client = httpx.Client(
            base_url=f"{url}/api/v1",
            headers=headers,
            verify=trust,
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        return cls(client, patience_s=patience_s)

    def call(self, method: str, path: str, *parts: str, body: Json = None) -> Json:
        """Return the answer; raises Refused, and Unreachable when the time is over."""
        url = "/".join([path, *(quote(part, safe="") for part in parts)])
        while True:
            try:
                response = self._client.request(method, url, json=body)
            except httpx.HTTPError as error:
                reason = f"{self._client.base_url}{url} cannot be reached: {error}"
            else:
                if response.is_success:
                    return response.json() if response.content else None
                reason = f"{method} {url}: {response.status_code} {_detail(response)}"
                if not self._may_change(response):
                    raise Refused(reason)
            self.pause(reason)

    def _may_change(self, response: httpx.Response) -> bool:
        """Return whether another try may be answered otherwise."""
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            has_token = "Authorization" in self._client.headers
            return has_token and time.monotonic() < self._token_until_s
        return response.status_code in NOT_YET

    def pause(self, reason: str) -> None:
        """Wait for the next try; raises Unreachable with the reason when there is none."""
        if time.monotonic() >= self._until_s:
            raise Unreachable(reason)
        time.sleep(PAUSE_S)

    def wait_until(self, holds: Callable[[], str]) -> None:
        """Wait until `holds` returns nothing; it returns what is missing."""
        while missing := holds():
            self.pause(missing)


def _detail(response: httpx.Response) -> str:
    try:
        problem = response.json()
        return f"{problem['title']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
