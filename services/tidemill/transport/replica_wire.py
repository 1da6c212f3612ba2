"""Conversion of replica runs, views and proposals to and from wire messages."""

from __future__ import annotations

from tidemill.common.feature_level import read_level
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as controller
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as wire


def to_member(member: ReplicaRun) -> wire.ReplicaRun:
    """Return a member for the wire."""
    return wire.ReplicaRun(replica_id=member.replica_id, incarnation=member.incarnation)


def from_member(found: wire.ReplicaRun) -> ReplicaRun:
    """Return the member of a message."""
    return ReplicaRun(ReplicaId(found.replica_id), found.incarnation)


def to_view(view: ReplicationView) -> wire.ReplicationView:
    """Return a view for the wire."""
    return wire.ReplicationView(
        epoch=view.epoch,
        version=view.version,
        master=None if view.master is None else to_member(view.master),
        sss=[to_member(one) for one in sorted(view.sss)],
        eligible=sorted(view.eligible),
        min_in_sync=view.min_in_sync,
        unclean_since=view.unclean_since,
        addresses=dict(view.addresses),
        retired=sorted(view.retired),
        group=view.group,
        feature_level=view.feature_level,
    )


def from_view(found: wire.ReplicationView) -> ReplicationView:
    """Return the view of a message."""
    return ReplicationView(
        epoch=found.epoch,
        version=found.version,
        master=from_member(found.master) if found.HasField("master") else None,
        sss=frozenset(from_member(one) for one in found.sss),
        eligible=frozenset(ReplicaId(one) for one in found.eligible),
        min_in_sync=found.min_in_sync,
        unclean_since=found.unclean_since,
        addresses=tuple((ReplicaId(one), at) for one, at in sorted(found.addresses.items())),
        retired=frozenset(ReplicaId(one) for one in found.retired),
        group=found.group,
        feature_level=read_level(found.feature_level),
    )


def to_proposal(proposal: Proposal) -> controller.Proposal:
    """Return a proposal for the wire."""
    return controller.Proposal(
        epoch=proposal.epoch,
        version=proposal.version,
        master=to_member(proposal.master),
        sss=[to_member(one) for one in sorted(proposal.sss)],
    )


def from_proposal(found: controller.Proposal) -> Proposal:
    """Return the proposal of a message."""
    return Proposal(
        epoch=found.epoch,
        version=found.version,
        master=from_member(found.master),
        sss=frozenset(from_member(one) for one in found.sss),
    )
