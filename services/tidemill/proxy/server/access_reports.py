"""The refused calls of this proxy, and the accesses of super users, for the access log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.common.errors import ServiceError, Unauthorized, codes_of
from tidemill.proxy.metrics import request_code
from tidemill.security.access_log import ACCESS, REFUSAL, AccessRecord, key_of, unverified_caller
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from tidemill.proxy.server.gated_call import GatedCall
    from tidemill.security.access_log import AccessLog
    from tidemill.security.acl import Action, Resource

VIA_SIGNATURE: Final = "signature"
OK_CODE: Final = 20_000
# The names of the public methods, by the label of metrics.
_NAMES: Final = {
    request_code(method.name): method.name
    for method in service.DESCRIPTOR.services_by_name["MessagingService"].methods
}


@final
class CallReports:
    """Writes calls to the access log of the process."""

    def __init__(self, log: AccessLog) -> None:
        self._log = log

    def note_refusal(
        self,
        call: GatedCall,
        error: ServiceError,
        actions: tuple[Action, ...],
        resource: Resource | None,
        *,
        passes: bool,
    ) -> None:
        """Note a call without its rights; it `passes` in the mode permissive."""
        known = None if call.caller is None else call.caller.known
        user, via = ("", "") if known is None else (known.user.name, known.via)
        claimed_user = ""
        if isinstance(error, Unauthorized):
            if error.user_name:
                user, via = error.user_name, error.via
            claimed_user = error.claimed_user
        action = " or ".join([each.text for each in actions])
        key = key_of(
            REFUSAL,
            user or unverified_caller(_address_of(call), claimed_user),
            _NAMES.get(call.method, call.method),
            "" if resource is None else str(resource),
            action or error.message,
        )
        if self._log.count_repeated(key):
            return
        self._log.note(
            AccessRecord(
                REFUSAL,
                user=user,
                via=via or (VIA_SIGNATURE if user else ""),
                address=_address_of(call),
                call=key[2],
                resource=key[3],
                action=action,
                result="would_refuse" if passes else "refused",
                code=codes_of(error).rocketmq,
                reason=error.message,
                claimed_user=claimed_user,
                client_id=call.client_id,
            )
        )

    def note_access(self, call: GatedCall, action: Action, resource: Resource) -> None:
        """Note an access of a super user."""
        assert call.caller is not None, "its user is verified"
        known = call.caller.known
        key = key_of(
            ACCESS, known.user.name, _NAMES.get(call.method, call.method), str(resource), ""
        )
        if self._log.count_repeated(key):
            return
        self._log.note(
            AccessRecord(
                ACCESS,
                user=known.user.name,
                via=known.via or VIA_SIGNATURE,
                address=_address_of(call),
                call=key[2],
                resource=key[3],
                action=action.text,
                result="ok",
                code=OK_CODE,
                reason="",
                client_id=call.client_id,
            )
        )


def _address_of(call: GatedCall) -> str:
    address = call.find_address()
    return "" if address is None else str(address)
