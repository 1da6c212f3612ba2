"""The refusal of a request by its credentials."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from tidemill.admin.http.problems import problem

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse

    from tidemill.common.errors import Unauthorized


class RefusedLogin(Exception):
    """A request without valid credentials, with its answer."""

    def __init__(
        self, reason: str, *, wait_s: int = 0, user: str = "", via: str = "", claimed_user: str = ""
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s  # until the next check; 0: at once
        # Only the audit log has them. The user has shown correct credentials.
        self.user, self.via = user, via
        self.claimed_user = claimed_user

    @classmethod
    def of(cls, error: Unauthorized, via: str = "") -> RefusedLogin:
        """Return the refusal of correct credentials, by default with the `via` of the error."""
        return cls(error.message, user=error.user_name, via=error.via or via)

    def answer(self, challenge: str) -> JSONResponse:
        """Return the problem document."""
        if self.wait_s:
            status = HTTPStatus.TOO_MANY_REQUESTS
            return problem(
                status, status.phrase, self.reason, status * 100, retry_after_s=self.wait_s
            )
        status = HTTPStatus.UNAUTHORIZED
        refusal = problem(status, status.phrase, self.reason, status * 100)
        refusal.headers["WWW-Authenticate"] = challenge
        return refusal
