"""The refused calls of this proxy, and the accesses of super users, for the access log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.common.errors import ServiceError, codes_of
from tidemill.proxy.metrics import request_code
from tidemill.security.access_log import ACCESS, REFUSAL, TEXT_CHARS_MAX, AccessRecord, RecordKey
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
        key = _key_of(REFUSAL, call, "" if resource is None else str(resource))
        if self._log.count_repeated(key):
            return
        self._log.note(
            _record(
                key,
                call,
                action=" or ".join(each.text for each in actions),
                result="would_refuse" if passes else "refused",
                code=codes_of(error).rocketmq,
                reason=error.message,
            )
        )

    def note_access(self, call: GatedCall, action: Action, resource: Resource) -> None:
        """Note an access of a super user."""
        key = _key_of(ACCESS, call, str(resource))
        if not self._log.count_repeated(key):
            record = _record(key, call, action=action.text, result="ok", code=OK_CODE, reason="")
            self._log.note(record)


def _key_of(kind: str, call: GatedCall, resource: str) -> RecordKey:
    user = "" if call.caller is None else call.caller.known.user.name
    return (
        kind,
        user or _address_of(call),
        _NAMES.get(call.method, call.method),
        resource[:TEXT_CHARS_MAX],
    )


def _address_of(call: GatedCall) -> str:
    address = call.find_address()
    return "" if address is None else str(address)


def _record(
    key: RecordKey, call: GatedCall, *, action: str, result: str, code: int, reason: str
) -> AccessRecord:
    kind, _, name, resource = key
    known = None if call.caller is None else call.caller.known
    via = "" if known is None else known.via or VIA_SIGNATURE
    return AccessRecord(
        kind,
        user="" if known is None else known.user.name,
        via=via,
        address=_address_of(call),
        call=name,
        resource=resource,
        action=action,
        result=result,
        code=code,
        reason=reason,
    )
