"""The brokers of a standalone and the folders of their stores in the data directory.

    data/                broker-0 or its replica broker-0-0
    data/broker-0-1/     the other replicas of broker-0
    data/broker-1/       broker-1 or its replica broker-1-0
    data/broker-1-1/     the other replicas of broker-1
    data/controller-0/   the records of broker groups with several replicas

If a broker group gets replicas later, its store becomes replica 0, which founds the group. No store
moves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.broker.data_dir import locked_data_dir
from tidemill.common.lifecycle import StartError
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.retirement import is_out
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.sqlite_store import read_record
from tidemill.standalone.settings import GROUPS_MAX, REPLICAS_MAX

if TYPE_CHECKING:
    from tidemill.standalone.settings import StandaloneSettings

FIRST_BROKER: Final = "broker-0"  # the home of the other broker groups
CONTROLLER: Final = "controller-0"
REPLICA_FOLDER: Final = "replica"  # in a store: the state that a replica must keep


class StandaloneBroker(NamedTuple):
    """One broker process and the folder of its store."""

    name: str  # of the process
    group: str
    replica: int  # -1: the only one of its broker group
    data_dir: Path


def brokers_of(settings: StandaloneSettings) -> list[StandaloneBroker]:
    """Return all brokers, one broker group after the other."""
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
    """Raise StartError if the data directory has a store that no broker would serve.

    Otherwise the messages of such a store would wait, and its message groups would be rejected,
    without a stated reason. For replicas it would be worse: the remaining replica may miss
    messages.
    """
    data_dir = settings.data_dir
    held = [
        n for n in range(settings.groups, GROUPS_MAX) if is_dir(store_of(data_dir, group_name(n)))
    ]
    if held:
        count = held[-1] + 1
        raise StartError(
            f"this data directory holds {count} broker groups: start with --groups {count}. If "
            f"broker group {group_name(held[-1])} was removed from the cluster, move its folder "
            f"{store_of(data_dir, group_name(held[-1]))} away"
        )
    # A single broker is not a replica, so replica 0 needs replica 1 even if replica 1 is retired.
    needed = [
        (n, group)
        for n in range(settings.replicas, REPLICAS_MAX)
        for group in map(group_name, range(settings.groups))
        if is_dir(store_of(data_dir, group, n)) and (n == 1 or not is_retired(settings, group, n))
    ]
    if needed:
        count = needed[-1][0] + 1
        raise StartError(
            f"this data directory holds {count} replicas of each broker group: start with"
            f" --replicas {count}. With fewer, the remaining replicas may miss acknowledged"
            f" messages.{_ways_to_fewer(settings, needed)}"
        )
    if settings.replicas == 1 and is_dir(data_dir / REPLICA_FOLDER):
        raise StartError(
            f"the store in {data_dir} is that of a replica, and other replicas may have messages"
            f" that it does not have: start with the same number of --replicas as before"
        )


def check_not_used(settings: StandaloneSettings) -> None:
    """Raise StartError if another broker uses a store.

    A broker takes the lock of its store itself. This check comes before the start of all processes.
    """
    for broker in brokers_of(settings):
        if is_dir(broker.data_dir):
            with locked_data_dir(broker.data_dir):
                pass


def _ways_to_fewer(settings: StandaloneSettings, needed: list[tuple[int, str]]) -> str:
    """Return the steps to the number of replicas in the settings, or to 2, the least number."""
    drains = [f"`tidemill replica drain {group}-{n}`" for n, group in needed if n > 1]
    least = max(settings.replicas, 2)
    text = ""
    if settings.replicas == 1:
        text = " A broker group of several replicas cannot become one of a single replica."
    if drains:
        text += (
            f" To start with --replicas {least}, first drain the others with {', '.join(drains)},"
            f" and stop when `tidemill replica list` reports them as retired"
        )
    return text.removesuffix(".")


def is_retired(settings: StandaloneSettings, group: str, replica: int) -> bool:
    """Return whether an operator has drained a replica, so that no message is lost without it.

    The operator may keep or delete its folder. If it is started again, it counts again once the
    operator takes the drain back.
    """
    try:
        record = read_record(group_store_of(settings), group)
    except StoreUnreachable:
        return False  # If all replicas start, the controller reports this.
    number = ReplicaId(replica)
    return record is not None and record.find(number) is not None and is_out(record, number)


def is_dir(path: Path) -> bool:
    """Return whether `path` is a folder; a broker reports an unreadable folder itself."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises where it may not look.
