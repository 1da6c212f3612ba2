"""Calls of the REST API while its processes start: a release job repeats them for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, final
from urllib.parse import quote

from tidemill.common.rest_client import Json, RestClient, RestRejection, RestUnreachable

TIMEOUT_S: Final = 10.0  # of one call; the admin process gives up on a broker sooner
# After a change of a Secret, the admin process has the old token, or the old secret of a user. Its
# node reads the Secret at most a minute and a half later. A job starts with the new one. A new user
# is known when the home has stored it.
TOKEN_EXCHANGE_S: Final = 120.0
PAUSE_S: Final = 0.5  # between two tries: a process starts within a second or two
# Answers of a load balancer, or of an admin process that has not found its brokers yet.
RETRIED: Final = frozenset(
    (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
)


class WaitTimeout(Exception):
    """A condition did not come true in time; the message says which."""


class ForeignAnswer(Exception):
    """The answer is not from the REST API; the message says which address gave it."""


@final
class PatientRestClient:
    """A REST client that repeats failed calls for `patience_s` after its creation.

    It repeats a refused login for `login_patience_s`. By default, that is `patience_s`, and at most
    TOKEN_EXCHANGE_S.
    """

    def __init__(
        self,
        client: RestClient,
        *,
        patience_s: float,
        login_patience_s: float | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._client = client
        self._pause_s = pause_s
        # A wrong credential fails sooner than the patience, which may be long.
        if login_patience_s is None:
            login_patience_s = min(patience_s, TOKEN_EXCHANGE_S)
        now_s = time.monotonic()
        self._until_s = now_s + patience_s
        self._login_until_s = now_s + login_patience_s

    def call(self, method: str, path: str, *parts: str, body: Json = None) -> Json:
        """Return the answer.

        Raises RestRejection, ForeignAnswer, and WaitTimeout when the time is over.
        """
        path = "/".join([path, *(quote(part, safe="") for part in parts)])
        while True:
            try:
                return self._client.call(method, path, body=body)
            except RestUnreachable as error:
                reason = f"{self._client.at(path)} cannot be reached: {error}"
            except RestRejection as error:
                if error.status < HTTPStatus.MULTIPLE_CHOICES:
                    raise self.foreign_answer(path) from error
                if self._is_refused_login(error.status):
                    if time.monotonic() >= self._login_until_s:
                        raise
                    time.sleep(self._pause_s)
                    continue
                if error.status not in RETRIED:
                    raise
                reason = str(error)
            self.pause(reason)

    def list_items(self, path: str, *keys: str) -> list[dict[str, Any]]:
        """Return the items of a list, which have these keys. Raises what `call` raises."""
        answer = self.call("GET", path)
        items = answer.get("items") if isinstance(answer, dict) else None
        if not isinstance(items, list) or not all(
            isinstance(one, dict) and one.keys() >= set(keys) for one in items
        ):
            raise self.foreign_answer(path)
        return items

    def foreign_answer(self, path: str) -> ForeignAnswer:
        """Return the error of an answer that has another form than the REST API gives."""
        return ForeignAnswer(
            f"{self._client.at(path)} does not answer as the REST API of Tidemill does; check that"
            " --admin is the address of the admin process, and not of another server"
        )

    def pause(self, reason: str) -> None:
        """Wait before the next try. Raises WaitTimeout with the reason when the time is over."""
        if time.monotonic() >= self._until_s:
            raise WaitTimeout(reason)
        time.sleep(self._pause_s)

    def wait_until(
        self, find_obstacle: Callable[[], str], report: Callable[[str], None] | None = None
    ) -> None:
        """Wait until `find_obstacle` returns ""; report each new obstacle of a long wait.

        Raises WaitTimeout with the obstacle.
        """
        reported = ""
        while obstacle := find_obstacle():
            if report is not None and obstacle != reported:
                report(f"waiting: {obstacle}")
                reported = obstacle
            self.pause(obstacle)

    def _is_refused_login(self, status: int) -> bool:
        """Whether the admin process does not know the credential, or not yet."""
        # After ten failed logins, the admin process answers 429 for some seconds.
        has_credential = bool(self._client.token or self._client.credentials)
        return has_credential and status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS}
