"""Messages of replicas and operators: conversion between the wire and values of elections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.common.feature_level import read_level
from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import CutTail, GroupRecord, Transition
from tidemill.controller.election.registration import Registration
from tidemill.controller.election.sessions import Heartbeat, ReplicaHealth
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.replica_wire import from_member, to_member, to_view

if TYPE_CHECKING:
    from tidemill.controller.group import BrokerGroupControl

_HEALTH: Final = {
    wire.HEALTH_OK: ReplicaHealth.OK,
    wire.HEALTH_SLOW: ReplicaHealth.SLOW,
    wire.HEALTH_FULL: ReplicaHealth.FULL,
}
_HEALTH_ON_WIRE: Final = {health: number for number, health in _HEALTH.items()}


def from_heartbeat(message: wire.Heartbeat) -> Heartbeat:
    """Return the heartbeat of a message; an unknown health counts as SLOW."""
    return Heartbeat(
        is_master=message.is_master,
        epoch_seen=message.epoch_seen,
        version_seen=message.version_seen,
        log_epoch=message.log_epoch,
        log_end=message.log_end,
        durable_end=message.durable_end,
        confirm=message.confirm,
        health=_HEALTH.get(message.health, ReplicaHealth.SLOW),
        page_age_ms=message.page_age_ms,
        blocked_ms=message.blocked_ms,
        peer_silence_ms=tuple(
            (ReplicaId(one), silence_ms)
            for one, silence_ms in sorted(message.peer_silence_ms.items())
        ),
        writable_epoch=message.writable_epoch,
        cut=_from_cut(message.cut) if message.HasField("cut") else None,
        diverged=frozenset(map(ReplicaId, message.diverged)),
    )


def to_heartbeat(member: ReplicaRun, beat: Heartbeat) -> wire.Heartbeat:
    """Return a heartbeat for the wire."""
    return wire.Heartbeat(
        member=to_member(member),
        is_master=beat.is_master,
        epoch_seen=beat.epoch_seen,
        version_seen=beat.version_seen,
        log_epoch=beat.log_epoch,
        log_end=beat.log_end,
        durable_end=beat.durable_end,
        confirm=beat.confirm,
        health=_HEALTH_ON_WIRE[beat.health],
        page_age_ms=beat.page_age_ms,
        blocked_ms=beat.blocked_ms,
        peer_silence_ms=dict(beat.peer_silence_ms),
        writable_epoch=beat.writable_epoch,
        cut=None if beat.cut is None else _to_cut(beat.cut),
        diverged=sorted(beat.diverged),
    )


def from_register(message: wire.Register) -> Registration:
    """Return the registration of a message."""
    return Registration(
        member=from_member(message.member),
        instead_of=message.instead_of,
        store_uuid=message.store_uuid,
        address=message.address,
        is_clean=message.is_clean,
        feature_level=read_level(message.feature_level),
    )


def to_group(
    group: BrokerGroupControl, *, now_ms: int, planned: GroupRecord | None = None
) -> wire.BrokerGroupStatus:
    """Return the state of a group, for operators: with its record, or with a planned one."""
    notice = group.notice or group.failed_transfer
    answer = wire.BrokerGroupStatus(name=group.name, alarm=group.alarm, notice=notice)
    if group.stored is None:
        return answer
    record, sessions = planned or group.stored.record, group.sessions()
    if record.transfer is not None:
        answer.transfer = record.transfer
    diverged, unheard = group.diverged_replicas(), group.unheard_pairs()
    answer.view.CopyFrom(to_view(group.view_of(record)))
    for replica_id, registered in record.replicas:
        status = answer.replicas.add(
            replica_id=replica_id,
            store_uuid=registered.store_uuid,
            incarnation=registered.incarnation,
            address=registered.address,
            is_unclean=registered.is_unclean,
            retired=registered.retired.value,
            is_diverged=replica_id in diverged,
            unheard=[other for one, other in sorted(unheard) if one == replica_id],
        )
        member = ReplicaRun(replica_id, registered.incarnation)
        session = sessions.get(member)
        if session is None:
            continue
        status.silent_ms = max(now_ms - session.heard_at_ms, 0)
        if session.beat is not None:
            status.heartbeat.CopyFrom(to_heartbeat(member, session.beat))
    answer.history.extend(_to_transition(one) for one in group.stored.record.history)
    return answer


def _to_transition(one: Transition) -> wire.Transition:
    return wire.Transition(
        epoch=one.epoch,
        source=one.source,
        target=one.target,
        reason=one.reason,
        at_ms=one.at_ms,
        detected_ms=one.detected_ms,
        away_ms=one.away_ms,
        cuts=[_to_cut(cut) for cut in one.cuts],
    )


def _to_cut(cut: CutTail) -> wire.Cut:
    return wire.Cut(
        replica_id=cut.replica_id,
        epoch=cut.epoch,
        offset=cut.offset,
        size_bytes=cut.size_bytes,
        records=cut.records,
        confirmed_bytes=cut.confirmed_bytes,
    )


def _from_cut(message: wire.Cut) -> CutTail:
    return CutTail(
        replica_id=ReplicaId(message.replica_id),
        epoch=message.epoch,
        offset=message.offset,
        size_bytes=message.size_bytes,
        records=message.records,
        confirmed_bytes=message.confirmed_bytes,
    )
