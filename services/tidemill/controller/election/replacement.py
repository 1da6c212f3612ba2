"""An operator's last resort: make a replica master, even if it may lack messages."""

from __future__ import annotations

from typing import Final

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.decide import live_of
from tidemill.controller.election.elect import may_be_master, with_master, with_survivor
from tidemill.controller.election.history import BY_OPERATOR
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.rollback import is_outdated, newest_seen
from tidemill.controller.election.sessions import ElectionTiming, GroupObservation

# Room for epochs and versions that no live replica has seen. Their masters may come back, and an
# epoch must have one master. An epoch on disk has 32 bits, enough for thousands of such orders.
UNSEEN_MAX: Final = 1 << 20
# The order waits for this silence of each replica that may have all messages. A master that was
# paused for longer than a replication stream may be silent (1 s) confirms no earlier message when
# it continues (`fencing.is_late`). Its last heartbeat was sent up to 0.2 s before the pause.
SILENT_MS: Final = 2_000


def replace_master(
    record: GroupRecord,
    target: ReplicaId,
    observation: GroupObservation,
    timing: ElectionTiming,
    *,
    reason: str,
) -> GroupRecord | ChangeRejection:
    """Return the record in which `target` is master, even if it lacks committed messages.

    Reject this while a complete replica may run.
    """
    live = live_of(record, observation, timing)
    member = record.find_member(target)
    if member is None:
        return ChangeRejection(f"replica {target} has not registered")
    if member not in {one.member for one in live}:
        return ChangeRejection(f"replica {target} is not live; start it first")
    reason = f"{BY_OPERATOR}{reason or 'no reason given'}"
    if is_outdated(record, live):
        # The new record must be above all epochs and versions that existed.
        seen = newest_seen(live)
        version = max(record.version, seen.version) + UNSEEN_MAX
        above = record._replace(epoch=max(record.epoch, seen.epoch) + UNSEEN_MAX, version=version)
        return with_survivor(above, member, reason=reason)
    if member == record.master:
        return record  # A repeated order: another election would only interrupt clients.
    if may_be_master(record, member):
        # It has all confirmed messages, so no message is lost.
        return with_master(record, member, {one.member for one in live}, reason=reason)
    silent_ms = max(SILENT_MS, timing.session_timeout_ms, timing.stall_limit_ms)
    complete = [
        id_
        for id_, one in record.replicas
        if may_be_master(record, run := ReplicaRun(id_, one.incarnation))
        if observation.may_run(run, silent_ms)
    ]
    if complete:
        return ChangeRejection(
            f"replica {target} may lack confirmed messages, and the replicas {complete}, which were"
            f" live in the last {silent_ms / 1000:g} s, do not; transfer to one of them, or stop"
            " them first"
        )
    heard = _heard_by_others(record, observation, silent_ms)
    if heard:
        return ChangeRejection(
            f"replica {target} may lack confirmed messages that another replica has, and that one"
            f" may run, although the controllers do not hear it: {heard} in the last"
            f" {silent_ms / 1000:g} s; connect it to the controllers, or stop it first"
        )
    return with_survivor(record, member, reason=reason)


def _heard_by_others(record: GroupRecord, observation: GroupObservation, silent_ms: int) -> str:
    """Return which replicas hear a complete replica, in words; empty: none does.

    The network between the controllers and a master may fail alone. The master and its replicas
    acknowledge messages then.
    """
    return " and ".join(
        f"replica {reporter} heard replica {id_}"
        for id_, one in record.replicas
        if may_be_master(record, run := ReplicaRun(id_, one.incarnation))
        for reporter in observation.reporters_of(run, silent_ms)
    )
