"""Refused requests and accesses of this process, for its access log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.admin.http.route_templates import PREFIX
from tidemill.admin.http.shown_secrets import GRPC
from tidemill.common.errors import CODES, Forbidden, Unauthorized
from tidemill.security.access_log import ACCESS, REFUSAL, AccessRecord
from tidemill.security.audit_results import AuditResult

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidemill.admin.http.actor import Actor
    from tidemill.admin.http.route_templates import RouteTemplates
    from tidemill.security.access_log import AccessLog

OK_CODE: Final = 20_000


@final
class RequestReports:
    """Writes requests to the access log of the process."""

    def __init__(self, log: AccessLog, paths: RouteTemplates) -> None:
        self._log = log
        self._paths = paths

    def note_refusal(
        self,
        scope: Scope,
        actor: Actor,
        reason: str,
        *,
        action: str = "",
        resource: str = "",
        passes: bool = False,
        is_known: bool = False,
    ) -> None:
        """Note a request with wrong or missing credentials, or of a known user without a right.

        It `passes` in the mode permissive.
        """
        self._log.note(
            AccessRecord(
                REFUSAL,
                user=actor.user,
                via=actor.via,
                address=actor.address,
                call=self._call_of(scope),
                resource=resource,
                action=action,
                result=AuditResult.WOULD_REFUSE if passes else AuditResult.REFUSED,
                code=CODES[Forbidden if is_known else Unauthorized].rocketmq,
                reason=reason,
                claimed_user=actor.claimed_user,
            )
        )

    def note_access(self, scope: Scope, actor: Actor) -> None:
        """Note a request of a super user."""
        note_access(self._log, actor, self._call_of(scope))

    def _call_of(self, scope: Scope) -> str:
        if scope["type"] == GRPC:
            return str(scope["path"])
        template = self._paths.find(scope["path"])
        path = "(unknown path)" if template is None else template.path.removeprefix(PREFIX)
        return f"{scope['method']} {path}"


def note_access(
    log: AccessLog, actor: Actor, call: str, *, resource: str = "", action: str = ""
) -> None:
    """Note an access of a super user, or a read of message bodies."""
    log.note(
        AccessRecord(
            ACCESS,
            user=actor.user,
            via=actor.via,
            address=actor.address,
            call=call,
            resource=resource,
            action=action,
            result="ok",
            code=OK_CODE,
            reason="",
            claimed_user=actor.claimed_user,
        )
    )
