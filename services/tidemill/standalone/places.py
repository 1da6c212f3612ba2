"""Which brokers there are, and where their stores lie in the data directory.

    data/                broker-0, or its replica broker-0-0: a store of before stays where it is
    data/broker-0-1/     the other replicas of broker-0
    data/broker-1/       broker-1, or its replica broker-1-0
    data/broker-1-1/     the other replicas of broker-1
    data/controller-0/   the records of broker groups, where they have several replicas

So a store that was one broker's becomes replica 0 of its group, which founds that, and nothing is
moved for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.common.lifecycle import StartError
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.retirement import is_out
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.sqlite_store import read_record
from tidemill.standalone.settings import GROUPS_MAX, REPLICAS_MAX

if TYPE_CHECKING:
    from tidemill.standalone.settings import StandaloneSettings

FIRST_BROKER: Final = "broker-0"  # the home of the others: a store of before is its own
CONTROLLER: Final = "controller-0"
REPLICA_FOLDER: Final = "replica"  # in a store: what a replica must not forget


class StandaloneBroker(NamedTuple):
    """One broker process, and where its store is."""

    name: str  # of the process
    group: str
    replica: int  # -1: its group has no other
    data_dir: Path


def brokers_of(settings: StandaloneSettings) -> list[StandaloneBroker]:
    """Return all brokers, group by group."""
    if settings.replicas == 1:
        return [
            StandaloneBroker(name, name, -1, store_of(settings.data_dir, name))
            for name in map(group_name, range(settings.groups))
        ]
    return [
        StandaloneBroker(
            f"{group}-{replica}", group, replica, store_of(settings.data_dir, group, replica)
        )
        for group in map(group_name, range(settings.groups))
        for replica in range(settings.replicas)
    ]


def group_name(n: int) -> str:
    """Return the name of a broker group by its number."""
    return f"broker-{n}"


def store_of(data_dir: Path, group: str, replica: int = 0) -> Path:
    """Return the folder of a store."""
    if replica:
        return data_dir / f"{group}-{replica}"
    return data_dir if group == FIRST_BROKER else data_dir / group


def group_store_of(settings: StandaloneSettings) -> Path:
    """Return the file with the records of broker groups."""
    return settings.data_dir / CONTROLLER / "groups.sqlite"


def check_all_served(settings: StandaloneSettings) -> None:
    """Raise StartError where a store is in the data directory that no broker would serve.

    Its messages would wait, and message groups that lie there be refused, without a word of why.
    Of replicas it would be worse: two that have all may be gone when the one that lags is alone.
    """
    data_dir = settings.data_dir
    held = [
        n for n in range(settings.groups, GROUPS_MAX) if is_dir(store_of(data_dir, group_name(n)))
    ]
    if held:
        count = held[-1] + 1
        raise StartError(
            f"this data directory holds {count} broker groups: start with --groups {count}, or "
            f"move {store_of(data_dir, group_name(held[-1]))} away if it was removed from "
            f"the cluster"
        )
    needed = [
        (n, group)
        for n in range(settings.replicas, REPLICAS_MAX)
        for group in map(group_name, range(settings.groups))
        if is_dir(store_of(data_dir, group, n)) and not is_retired(settings, group, n)
    ]
    if needed:
        count = needed[-1][0] + 1
        drains = ", ".join(f"`tidemill cluster drain {group}-{n}`" for n, group in needed)
        raise StartError(
            f"this data directory holds {count} replicas of each broker group: start with"
            f" --replicas {count}. With fewer, those that are left could lack what the others"
            f" have acknowledged. To have fewer, let them go first: {drains}, and stop when"
            f" `tidemill cluster status` says that they are retired"
        )
    if settings.replicas == 1 and is_dir(data_dir / REPLICA_FOLDER):
        raise StartError(
            f"the store in {data_dir} is a replica's, and others may have what it lacks: start"
            f" with as many --replicas as there were"
        )


def is_retired(settings: StandaloneSettings, group: str, replica: int) -> bool:
    """Whether an operator has drained a replica, and nothing is lost without it.

    Its folder may stay, or go. With as many replicas as before it comes back, and counts again when
    that is taken back. Of one that stays alone nobody would be told: it is no replica any more.
    """
    if settings.replicas == 1:
        return False
    try:
        record = read_record(group_store_of(settings), group)
    except StoreUnreachable:
        return False  # The controller will say so, where all of them are started.
    number = ReplicaId(replica)
    return record is not None and record.find(number) is not None and is_out(record, number)


def is_dir(path: Path) -> bool:
    """Whether it is a folder; of one that may not be read the brokers tell themselves."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises where it may not look.
