"""The JSON of a group record, which stores keep and people read.

    {"epoch": 3, "version": 17, "master": {"replica": 1, "incarnation": "4f..."}, "sss": [...], ..}

A reader ignores unknown names and uses the default of an absent name, because controllers of two
versions share one record during an upgrade.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import (
    CutTail,
    GroupRecord,
    KeptStore,
    RegisteredRun,
    Retirement,
    Transition,
)

RECORD_BYTES_MAX: Final = 32 << 10  # the record is read and written at each change


def to_text(record: GroupRecord) -> str:
    """Return a record as JSON text; equal records have equal text."""
    text = json.dumps(to_json(record), sort_keys=True, separators=(",", ":"))
    assert len(text) <= RECORD_BYTES_MAX, "the history of a record is bounded"
    return text


def from_text(text: str) -> GroupRecord:
    """Return the record of a JSON text."""
    return from_json(json.loads(text))


def to_json(record: GroupRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
    return {
        "minInSync": record.min_in_sync,
        "epoch": record.epoch,
        "version": record.version,
        "master": None if record.master is None else _member(record.master),
        "sss": [_member(one) for one in sorted(record.sss)],
        "eligible": sorted(record.eligible),
        "suspects": sorted(record.suspects),
        "keptStores": [_kept_store(one) for one in record.kept_stores],
        "replicas": [_registered(id_, one) for id_, one in record.replicas],
        "transfer": record.transfer,
        "uncleanSince": record.unclean_since,
        "writeId": record.write_id,
        "history": [_transition(one) for one in record.history],
    }


def from_json(found: dict[str, Any]) -> GroupRecord:
    """Return the record of JSON values."""
    master, transfer = found.get("master"), found.get("transfer")
    replicas = sorted(_read_registered(one) for one in found.get("replicas", ()))
    return GroupRecord(
        min_in_sync=found["minInSync"],
        epoch=found.get("epoch", 0),
        version=found.get("version", 0),
        master=None if master is None else _read_member(master),
        sss=frozenset(_read_member(one) for one in found.get("sss", ())),
        eligible=frozenset(ReplicaId(one) for one in found.get("eligible", ())),
        suspects=frozenset(ReplicaId(one) for one in found.get("suspects", ())),
        kept_stores=tuple(_read_kept_store(one) for one in found.get("keptStores", ())),
        replicas=tuple(replicas),
        transfer=None if transfer is None else ReplicaId(transfer),
        unclean_since=found.get("uncleanSince", 0),
        write_id=found.get("writeId", ""),
        history=tuple(_read_transition(one) for one in found.get("history", ())),
    )


def _member(member: ReplicaRun) -> dict[str, Any]:
    return {"replica": member.replica_id, "incarnation": member.incarnation}


def _read_member(found: dict[str, Any]) -> ReplicaRun:
    return ReplicaRun(ReplicaId(found["replica"]), found["incarnation"])


def _kept_store(kept: KeptStore) -> dict[str, Any]:
    return {"replica": kept.replica_id, "storeUuid": kept.store_uuid, "unclean": kept.is_unclean}


def _read_kept_store(found: dict[str, Any]) -> KeptStore:
    return KeptStore(ReplicaId(found["replica"]), found["storeUuid"], found["unclean"])


def _registered(replica_id: ReplicaId, registered: RegisteredRun) -> dict[str, Any]:
    return {
        "replica": replica_id,
        "storeUuid": registered.store_uuid,
        "incarnation": registered.incarnation,
        "address": registered.address,
        "unclean": registered.is_unclean,
        "retired": registered.retired.value,
        "featureLevel": registered.feature_level,
    }


def _read_registered(found: dict[str, Any]) -> tuple[ReplicaId, RegisteredRun]:
    return ReplicaId(found["replica"]), RegisteredRun(
        store_uuid=found["storeUuid"],
        incarnation=found["incarnation"],
        address=found["address"],
        is_unclean=found["unclean"],
        retired=Retirement(found.get("retired", "")),
        feature_level=found.get("featureLevel", 0),
    )


def _transition(one: Transition) -> dict[str, Any]:
    return {
        "epoch": one.epoch,
        "from": one.source,
        "to": one.target,
        "reason": one.reason,
        "atMs": one.at_ms,
        "detectedMs": one.detected_ms,
        "writeId": one.write_id,
        "awayMs": one.away_ms,
        "cuts": [
            {
                "replica": cut.replica_id,
                "epoch": cut.epoch,
                "offset": cut.offset,
                "bytes": cut.size_bytes,
                "records": cut.records,
                "confirmedBytes": cut.confirmed_bytes,
            }
            for cut in one.cuts
        ],
    }


def _read_transition(found: dict[str, Any]) -> Transition:
    source = found.get("from")
    return Transition(
        epoch=found["epoch"],
        source=None if source is None else ReplicaId(source),
        target=ReplicaId(found["to"]),
        reason=found["reason"],
        at_ms=found.get("atMs", 0),
        detected_ms=found.get("detectedMs", 0),
        write_id=found.get("writeId", ""),
        away_ms=found.get("awayMs"),
        cuts=tuple(
            CutTail(
                replica_id=ReplicaId(cut["replica"]),
                epoch=cut["epoch"],
                offset=cut["offset"],
                size_bytes=cut["bytes"],
                records=cut["records"],
                confirmed_bytes=cut.get("confirmedBytes", 0),
            )
            for cut in found.get("cuts", ())
        ),
    )
