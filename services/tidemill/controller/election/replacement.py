"""An operator's last resort: a replica is master at once, also where it may lack something."""

from __future__ import annotations

from typing import Final

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import Candidate, may_be_master, with_master, with_survivor
from tidemill.controller.election.history import BY_OPERATOR
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord

# Elections, and writes, that nobody has seen who is heard: who led them may come back, and an epoch
# has one master. An epoch of a record on disk has 32 bits: enough for thousands of such orders.
UNSEEN_MAX: Final = 1 << 20


def replaced(
    record: GroupRecord, target: ReplicaId, live: list[Candidate], *, reason: str
) -> GroupRecord | ChangeRejection:
    """Return the record in which `target` is master, whatever it lacks.

    Refused while somebody is there who lacks nothing. Who has stood still for so long confirms
    nothing of before when it goes on (`fencing.is_late`), and hears of this.
    """
    member = record.find_member(target)
    if member is None:
        return ChangeRejection(f"no replica {target} has registered")
    if member not in {one.member for one in live}:
        return ChangeRejection(f"replica {target} is not there: nobody could be master")
    reason = f"{BY_OPERATOR}{reason or 'no reason was given'}"
    seen = max((one.beat.epoch_seen for one in live), default=0)
    if seen > record.epoch:
        # The record is an old one, and knows of nobody what it has: above all that was.
        version = max(record.version, *(one.beat.version_seen for one in live)) + UNSEEN_MAX
        above = record._replace(epoch=seen + UNSEEN_MAX, version=version)
        return with_survivor(above, member, reason=reason)
    if may_be_master(record, member):
        # It has all that is confirmed: nothing is lost, and nobody has to be told so.
        return with_master(record, member, {one.member for one in live}, reason=reason)
    better = [one.member.replica_id for one in live if may_be_master(record, one.member)]
    if better:
        return ChangeRejection(
            f"replica {target} may lack what was confirmed, and {better} do not and are"
            " there: stop them first if they cannot be kept"
        )
    return with_survivor(record, member, reason=reason)
