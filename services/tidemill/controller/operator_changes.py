"""Changes that operators request, as functions of the record of a broker group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.decide import live_of
from tidemill.controller.election.membership import ChangeRejection, with_min_in_sync
from tidemill.controller.election.record import GroupRecord, Retirement
from tidemill.controller.election.registration import FencedRun
from tidemill.controller.election.replacement import replace_master
from tidemill.controller.election.retirement import is_retired, retire, stay
from tidemill.controller.election.sessions import GroupObservation
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

if TYPE_CHECKING:
    from tidemill.controller.election.sessions import ElectionTiming

Denial: TypeAlias = ChangeRejection | FencedRun
# Returns the next record, the same record (nothing to do), or the reason against a change.
ChangeRequest: TypeAlias = Callable[[GroupRecord, GroupObservation], GroupRecord | Denial]


def transfer_of(message: wire.TransferMasterRequest, timing: ElectionTiming) -> ChangeRequest:
    """Return the change that names the next master."""

    def transfer(record: GroupRecord, observation: GroupObservation) -> GroupRecord | Denial:
        live = {one.member for one in live_of(record, observation, timing)}
        others = sorted(
            one.replica_id
            for one in record.sss & live
            if one != record.master and not is_retired(record, one.replica_id)
        )
        target = ReplicaId(message.target) if message.HasField("target") else None
        if target is None:
            target = others[0] if others else None
        if record.master is not None and target == record.master.replica_id:
            return record
        if target not in others:
            return ChangeRejection(
                f"only a live member of the sync state set that is not retired can take over:"
                f" {', '.join(map(str, others)) or 'there is none'}"
            )
        return record._replace(transfer=target, version=record.version + 1)

    return transfer


def drain_of(message: wire.DrainReplicaRequest) -> ChangeRequest:
    """Return the change that retires a replica, or ends its retirement."""
    target = ReplicaId(message.target)

    def drain(record: GroupRecord, _observation: GroupObservation) -> GroupRecord | Denial:
        if message.undo:
            return stay(record, target, Retirement.DRAINED)
        return retire(record, target, Retirement.DRAINED)

    return drain


def min_in_sync_of(
    message: wire.SetMinInSyncRequest, timing: ElectionTiming, *, has_spec: bool
) -> ChangeRequest:
    """Return the change of the number of replicas that must store a message."""

    def set_min(record: GroupRecord, observation: GroupObservation) -> GroupRecord | Denial:
        if has_spec:
            return ChangeRejection(
                "the BrokerGroup resource sets min-in-sync; change minInSync in the values"
            )
        is_led = observation.find_live(record.master, timing) is not None
        return with_min_in_sync(record, message.min_in_sync, is_led=is_led)

    return set_min


def replacement_of(message: wire.ForceMasterRequest, timing: ElectionTiming) -> ChangeRequest:
    """Return the change to a master that may lack confirmed messages."""
    target = ReplicaId(message.target)

    def force(record: GroupRecord, observation: GroupObservation) -> GroupRecord | Denial:
        return replace_master(record, target, observation, timing, reason=message.reason)

    return force
