"""The JSON of a group record, which stores keep and people read.

    {"epoch": 3, "version": 17, "master": {"replica": 1, "incarnation": "4f..."}, "sss": [...], ..}

A reader ignores unknown names and uses the default of an absent name, because controllers of two
versions share one record during an upgrade.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tidemill.common.feature_level import read_level
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
        "featureLevel": record.feature_level,
        "writeId": record.write_id,
        "history": [_transition(one) for one in record.history],
    }


def from_json(values: dict[str, Any]) -> GroupRecord:
    """Return the record of JSON values."""
    master, transfer = values.get("master"), values.get("transfer")
    replicas = sorted(_read_registered(one) for one in values.get("replicas", ()))
    return GroupRecord(
        min_in_sync=values["minInSync"],
        epoch=values.get("epoch", 0),
        version=values.get("version", 0),
        master=None if master is None else _read_member(master),
        sss=frozenset(_read_member(one) for one in values.get("sss", ())),
        eligible=frozenset(ReplicaId(one) for one in values.get("eligible", ())),
        suspects=frozenset(ReplicaId(one) for one in values.get("suspects", ())),
        kept_stores=tuple(_read_kept_store(one) for one in values.get("keptStores", ())),
        replicas=tuple(replicas),
        transfer=None if transfer is None else ReplicaId(transfer),
        unclean_since=values.get("uncleanSince", 0),
        feature_level=read_level(values.get("featureLevel", 0)),
        write_id=values.get("writeId", ""),
        history=tuple(_read_transition(one) for one in values.get("history", ())),
    )


def _member(member: ReplicaRun) -> dict[str, Any]:
    return {"replica": member.replica_id, "incarnation": member.incarnation}


def _read_member(values: dict[str, Any]) -> ReplicaRun:
    return ReplicaRun(ReplicaId(values["replica"]), values["incarnation"])


def _kept_store(store: KeptStore) -> dict[str, Any]:
    return {"replica": store.replica_id, "storeUuid": store.store_uuid, "unclean": store.is_unclean}


def _read_kept_store(values: dict[str, Any]) -> KeptStore:
    return KeptStore(ReplicaId(values["replica"]), values["storeUuid"], values["unclean"])


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


def _read_registered(values: dict[str, Any]) -> tuple[ReplicaId, RegisteredRun]:
    return ReplicaId(values["replica"]), RegisteredRun(
        store_uuid=values["storeUuid"],
        incarnation=values["incarnation"],
        address=values["address"],
        is_unclean=values["unclean"],
        retired=Retirement(values.get("retired", "")),
        feature_level=read_level(values.get("featureLevel", 0)),
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


def _read_transition(values: dict[str, Any]) -> Transition:
    source = values.get("from")
    return Transition(
        epoch=values["epoch"],
        source=None if source is None else ReplicaId(source),
        target=ReplicaId(values["to"]),
        reason=values["reason"],
        at_ms=values.get("atMs", 0),
        detected_ms=values.get("detectedMs", 0),
        write_id=values.get("writeId", ""),
        away_ms=values.get("awayMs"),
        cuts=tuple(
            CutTail(
                replica_id=ReplicaId(cut["replica"]),
                epoch=cut["epoch"],
                offset=cut["offset"],
                size_bytes=cut["bytes"],
                records=cut["records"],
                confirmed_bytes=cut.get("confirmedBytes", 0),
            )
            for cut in values.get("cuts", ())
        ),
    )
