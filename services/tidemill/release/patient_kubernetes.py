"""Calls of the Kubernetes API that a release job repeats during an outage.

A control plane that is upgraded or busy closes connections and answers with 429 or 5xx for minutes.
A repeated call may follow one that the API server has carried out without an answer. So deletions
name the id of the object, and creations accept their own object.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar, final

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from tidemill.release.kubernetes_errors import explain_failure, may_succeed_later

Answer = TypeVar("Answer")


@final
class PatientCalls:
    """Calls that are repeated until `pause` gives up; each outage is reported once."""

    def __init__(self, pause: Callable[[str], None], report: Callable[[str], None]) -> None:
        self._pause = pause
        self._report = report

    def make(self, call: Callable[[], Answer]) -> Answer:
        """Return the answer. Raises ApiException, and the error of `pause` after an outage."""
        is_reported = False
        while True:
            try:
                return call()
            except (ApiException, HTTPError) as error:
                if not may_succeed_later(error):
                    raise
                reason = explain_failure(error)
            if not is_reported:
                self._report(f"waiting: {reason}")
                is_reported = True
            self._pause(reason)

    def find(self, call: Callable[[], Answer]) -> Answer | None:
        """Return the answer; None: the object does not exist."""
        try:
            return self.make(call)
        except ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
