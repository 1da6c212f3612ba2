"""What do 10,000 users with 20 entries each cost a proxy?

The link of a proxy gets the whole table in the pages of a broker. Then each user sends once and
receives once, a user and a role change, and the link gets the whole table of another store. All
resources have different names. Measured in a new process, for each run:

memory_mib   growth of anonymous memory: after the load, and after all users were used
load_cpu_ms  to read all pages, as at a start
turn_cpu_ms  the longest turn of each kind, after which other tasks may run
collection_cpu_ms
             the longest garbage collection beside each kind of turns, not counted there, and a
             full one, which runs after some million new objects

The goals are 64 MiB, 200 ms and 2 ms.

    python -m tests.perf.bench_users [--users 10000] [--runs 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.worlds.access_world import signed
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.metadata.security_items import SecurityItems
from tidemill.broker.server.wire.security_frames import SecurityPages, changed_items
from tidemill.common.lifecycle import tune_garbage_collector
from tidemill.message.client_key import ClientKey
from tidemill.proxy.link.broker_configuration import BrokerConfiguration
from tidemill.proxy.server.access import AccessGate
from tidemill.proxy.server.call import CLIENT_ID, Call
from tidemill.security.acl import Action, parse_entry
from tidemill.security.identities import AccessRole, User, producer_entries
from tidemill.security.secret_keys import SecretKeys, new_key_line, parse_keys
from tidemill.security.table import Mode, SecurityTable, mode_item
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# Of one user: 20 entries.
SENT_TOPICS, RECEIVED_TOPICS, GROUPS = 8, 6, 6
SECRET = "a secret of sixteen"  # Of all users.
HANDLE_SECRETS = (b"a" * 32, b"b" * 32)  # of two stores

Figures: TypeAlias = dict[str, Any]


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    key_line = new_key_line("k1")
    tables = [list(_frames(options.users, parse_keys(key_line), s)) for s in HANDLE_SECRETS]
    runs = []
    for _ in range(options.runs):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as process:
            runs.append(process.submit(measure, key_line, tables, options.users).result())
    result = {
        "bench": "users",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "users": options.users,
        **{part: _medians([run[part] for run in runs]) for part in runs[0]},
    }
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: round(statistics.median([run[name] for run in runs]), 2) for name in names}


# ---------------------------------------------------------------- the table


def _frames(users: int, keys: SecretKeys, handle_secret: bytes) -> Iterator[bytes]:
    """Yield the configuration of a broker, and the pages of its security items."""
    table = SecurityItems()
    items = [mode_item(Mode.ON), *(_user(n, keys).to_item() for n in range(users))]
    for version, item in enumerate(items, 1):
        table.apply({**item, "version": version})
    pages = SecurityPages(table)
    config = link_pb2.ConfigUpdate(
        is_complete=True, broker_name="broker-0", handle_secret=handle_secret
    )
    pages.announce(config)
    yield config.SerializeToString()
    is_complete = False
    while not is_complete:
        page = pages.next_page()
        is_complete = page.is_security_complete
        yield page.SerializeToString()


def _name(number: int) -> str:
    return f"user-{number:05}"


def _user(number: int, keys: SecretKeys, *, changed_by: str = "root at 10.1.2.3") -> User:
    name, now_ms = _name(number), 1_795_750_000_000
    secret = keys.seal(SECRET.encode(), user_id=number, secret_id=1, created_at_ms=now_ms)
    entries = [
        *(parse_entry(f"Topic:{name}-sent-{n}", ("Pub",)) for n in range(SENT_TOPICS)),
        *(parse_entry(f"Topic:{name}-received-{n}", ("Sub",)) for n in range(RECEIVED_TOPICS)),
        *(parse_entry(f"Group:{name}-group-{n}", ("Sub",)) for n in range(GROUPS)),
    ]
    return User(
        name=name,
        id=number,
        secrets=(secret,),
        entries=tuple(entries),
        created_at_ms=now_ms,
        changed_at_ms=now_ms,
        changed_by=changed_by,
    )


# ---------------------------------------------------------------- one process


class Proxy:
    """The parts of a proxy that have users: the copy of the link, the table and the gate."""

    def __init__(self, keys: SecretKeys) -> None:
        self.configuration = BrokerConfiguration()
        security = self.configuration.security
        table = SecurityTable(self._find, lambda: security.counts, self._list_users)
        security.on_change, security.on_table = table.note_change, table.note_all_changed
        self.gate = AccessGate(table, lambda: keys, lambda: time.time_ns() // 1_000_000)

    def _find(self, kind: str, name: str) -> bytes | None:
        return self.configuration.security.items.get((kind, name))

    def _list_users(self, field: str, value: str) -> Collection[str]:
        return self.configuration.security.identities.find(field, value)

    def read(self, frame: bytes) -> None:
        """Read a frame as the link does."""
        self.configuration.apply(link_pb2.ConfigUpdate.FromString(frame))

    def use(self, number: int) -> None:
        """Check a send and a receive of a user."""
        name = _name(number)
        headers = {CLIENT_ID: name, **signed(name, SECRET)}
        for method in ("send_message", "receive_message"):
            call = Call(
                headers,
                peer=lambda: "ipv4:10.1.2.3:4711",
                connection=ClientKey(name),
                time_remaining_s=3.0,
                gate=self.gate,
            )
            call.method = method
            call.check()
            if method == "send_message":
                call.require_topic(f"{name}-sent-1", Action.PUB)
            else:
                call.require_consumer(f"{name}-group-1", f"{name}-received-1")


def measure(key_line: str, tables: list[list[bytes]], users: int) -> Figures:
    """Measure one proxy in this process."""
    keys = parse_keys(key_line)
    _warm_up(keys)
    proxy = Proxy(keys)
    tune_garbage_collector()
    begin_mib = _memory_mib()
    turns, collections = dict[str, float](), _Collections()
    gc.callbacks.append(collections.note)
    memory_mib: dict[str, float] = {}
    load_ms = _longest(turns, collections, "load", proxy.read, tables[0])
    memory_mib["loaded"] = _memory_mib() - begin_mib
    _longest(turns, collections, "first_use", proxy.use, range(users))
    memory_mib["used"] = _memory_mib() - begin_mib
    _longest(turns, collections, "next_use", proxy.use, range(users))
    changed = _user(1, keys, changed_by="another")
    role = AccessRole(name="sellers", entries=producer_entries("orders"))
    for kind, item in ("user_change", changed.to_item()), ("role_change", role.to_item()):
        encoded = encode_item({**item, "version": users + 2})
        frame = changed_items({(item["op"], item["name"]): encoded}, users + 2)
        _longest(turns, collections, kind, proxy.read, [frame.SerializeToString()])
    _longest(turns, collections, "use_after_role_change", proxy.use, range(users))
    memory_mib["used_after_role_change"] = _memory_mib() - begin_mib
    _longest(turns, collections, "load_of_another_store", proxy.read, tables[1])
    _longest(turns, collections, "use_of_another_store", proxy.use, range(users))
    memory_mib["used_of_another_store"] = _memory_mib() - begin_mib
    gc.collect()
    return {
        "memory_mib": memory_mib,
        "load": {"cpu_ms": load_ms},
        "turn_cpu_ms": turns,
        "collection_cpu_ms": collections.longest_ms,
    }


class _Collections:
    """The CPU time of garbage collections."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.kind = ""  # of the present turns
        self.longest_ms: dict[str, float] = {}  # by kind
        self._begin_s = 0.0

    def note(self, phase: str, details: dict[str, int]) -> None:
        """Note the begin or the end of a collection, as a callback of the collector."""
        if phase == "start":
            self._begin_s = time.process_time()
            return
        used_s = time.process_time() - self._begin_s
        kind = "full" if details["generation"] == 2 else self.kind
        self.total_s += used_s
        self.longest_ms[kind] = max(self.longest_ms.get(kind, 0.0), used_s * 1e3)


def _warm_up(keys: SecretKeys) -> None:
    """Import what the first call needs, and fill the caches that do not depend on users."""
    proxy = Proxy(keys)
    for frame in _frames(1, keys, HANDLE_SECRETS[0]):
        proxy.read(frame)
    proxy.use(0)
    gc.collect()


def _longest(
    turns: dict[str, float],
    collections: _Collections,
    kind: str,
    act: Callable[[Any], None],
    arguments: Iterable[Any],
) -> float:
    """Act in turns, and note the longest one; return the CPU time of all in milliseconds."""
    longest = total = 0.0
    collections.kind = kind
    for argument in arguments:
        begin_s, collected_s = time.process_time(), collections.total_s
        act(argument)
        used = time.process_time() - begin_s
        longest = max(longest, used - (collections.total_s - collected_s))
        total += used
    turns[kind] = longest * 1e3
    return total * 1e3


def _memory_mib() -> float:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous = next(line for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return int(anonymous.split()[1]) / 1024


if __name__ == "__main__":
    main()
