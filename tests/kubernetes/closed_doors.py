"""Network policies of a release: every port, tried from every pod.

    KUBECONFIG=... python -m tests.kubernetes.closed_doors [--namespace NAME] [--image tidemill:dev]

It installs the chart into a new namespace, with a foreign pod in this namespace and in another one.
It prints a table. Its status is 1 if a port does not match the values: first with the chart's
default values, then with all restrictions of `networkPolicy`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.cluster import LOOK_EVERY_S, Cluster, output_of
from tests.support.eventually import eventually

ENFORCED_S = 60.0  # For the enforcement of policies and the start of pods.
LISTENING = 8000  # The port of foreign pods, which the release does not use.
# Tries all ports in parallel, each for long enough to repeat a dropped packet.
KNOCK = """
import json, socket, sys, threading
found = {}
def knock(door):
    host, port = door.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 2.5).close()
        found[door] = True
    except OSError:
        found[door] = False
threads = [threading.Thread(target=knock, args=(door,)) for door in sys.argv[1:]]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(found))
"""
# These ports have a server, so only a policy blocks them.
OPEN: dict[str, object] = {"admin": {"scaler": {"enabled": True}}}
CLOSED: dict[str, object] = {
    "networkPolicy": {
        "clientsFrom": [{"podSelector": {"matchLabels": {"role": "client"}}}],
        "adminFrom": [{"podSelector": {"matchLabels": {"role": "operator"}}}],
        "metricsFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "OTHER"}}}
        ],
        "egress": {"enabled": True},
    }
}
OPEN_DOORS = ("proxy:8081", "admin:8080", "broker:5557", "proxy:5557", "admin:5557")
METRICS = ("broker:5557", "proxy:5557", "admin:5557")
# Open ports by source: with the chart's default values, and with CLOSED. The release always reaches
# its brokers. With closed egress it does not reach a foreign pod.
DEFAULT = {
    "client": (*OPEN_DOORS, "stranger:8000"),
    "operator": (*OPEN_DOORS, "stranger:8000"),
    "stranger": (*OPEN_DOORS, "stranger:8000"),
    "foreigner": (*OPEN_DOORS, "stranger:8000"),
    "proxy": (*OPEN_DOORS, "broker:10911", "stranger:8000"),
    "admin": (*OPEN_DOORS, "broker:10911", "stranger:8000"),
    "broker": (*OPEN_DOORS, "broker:10911", "stranger:8000"),
}
SHUT = {
    "client": ("proxy:8081", "stranger:8000"),
    "operator": ("admin:8080", "stranger:8000"),
    "stranger": ("stranger:8000",),
    "foreigner": (*METRICS, "stranger:8000"),
    # Jobs and processes of the release have its labels: proxies and admin accept them.
    "proxy": ("broker:10911", "proxy:8081", "admin:8080"),
    "admin": ("broker:10911", "proxy:8081", "admin:8080"),
    "broker": ("broker:10911", "proxy:8081", "admin:8080"),
}
OUTSIDERS = ("client", "operator", "stranger", "foreigner")
# A policy does not apply to a pod's own ports: a pod always reaches itself.
Doors = Mapping[str, tuple[str, ...]]


def main() -> int:
    """Try all ports with two values files; the status is 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namespace", default="tidemill-doors")
    parser.add_argument("--image", default="tidemill:dev", help="repository:tag of the processes")
    options = parser.parse_args()
    other = Cluster(namespace=f"{options.namespace}-other", image=options.image)
    with tempfile.TemporaryDirectory() as folder:
        opened, closed = (
            Cluster(
                namespace=options.namespace,
                image=options.image,
                more_values=written(Path(folder) / f"{number}.yaml", values, other.namespace),
            )
            for number, values in enumerate((OPEN, OPEN | CLOSED))
        )
        return tried(opened, closed, other)


def written(file: Path, values: Mapping[str, object], other: str) -> str:
    """Write a values file and return its name."""
    file.write_text(yaml.safe_dump(dict(values)).replace("OTHER", other))
    return str(file)


def tried(opened: Cluster, closed: Cluster, other: Cluster) -> int:
    """Try all ports of one release with each of two values; return 1 if a result is wrong."""
    with namespaces(opened, other):
        opened.helm("install")
        for name in OUTSIDERS:
            where = other if name == "foreigner" else opened
            where.kubectl("apply", "-f", "-", given=json.dumps(outsider(name, opened.image)))
        wrong = print_table("the chart's own values", doors_are(opened, other, DEFAULT))
        closed.helm("upgrade")
        wrong += print_table("all that networkPolicy closes", doors_are(closed, other, SHUT))
        output_of(["helm", "-n", closed.namespace, "test", "tidemill"], within_s=120)
        sys.stdout.write("helm test: passed with all of it closed\n")
    return int(wrong > 0)


@contextmanager
def namespaces(*clusters: Cluster) -> Iterator[None]:
    """Create these namespaces for the block."""
    for cluster in clusters:
        cluster.create()
    try:
        yield
    finally:
        for cluster in clusters:
            cluster.remove()


def outsider(name: str, image: str) -> dict[str, Any]:
    """Return a foreign pod with a listening port."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"role": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "knock",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [
                        "python",
                        "-m",
                        "http.server",
                        str(LISTENING),
                        "--directory",
                        "/tmp",
                    ],
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
                }
            ],
        },
    }


def doors_are(cluster: Cluster, other: Cluster, wanted: Doors) -> dict[str, dict[str, bool]]:
    """Return the open ports by source, once they are as expected or at the timeout."""
    found: dict[str, dict[str, bool]] = {}

    def is_as_wanted() -> bool:
        found.clear()
        found.update(knocked(cluster, other))
        return not differences(found, wanted)

    try:
        eventually(is_as_wanted, within_ms=int(ENFORCED_S * 1000), every_s=LOOK_EVERY_S)
    except AssertionError:
        for line in differences(found, wanted):
            sys.stdout.write(f"WRONG {line}\n")
        return {**found, "WRONG": {}}
    return found


def knocked(cluster: Cluster, other: Cluster) -> dict[str, dict[str, bool]]:
    """Return the open ports of every source, by `component:port`."""
    pods = {
        labels.get("app.kubernetes.io/component", labels.get("role")): item
        for item in cluster.objects("pods")
        for labels in [item["metadata"]["labels"]]
        if "deletionTimestamp" not in item["metadata"]
    }
    doors = {
        f"{name}:{port}": f"{pods[name]['status'].get('podIP', '0.0.0.0')}:{port}"
        for name, ports in {
            "broker": (10911, 5557),
            "proxy": (8081, 5557),
            "admin": (8080, 9090, 5557),
            "stranger": (LISTENING,),
        }.items()
        for port in ports
    }
    found = {}
    for who in DEFAULT:
        where = other if who == "foreigner" else cluster
        pod = pods[who]["metadata"]["name"] if who in pods else who
        try:
            said = where.kubectl("exec", pod, "--", "python", "-c", KNOCK, *doors.values())
        except AssertionError:  # The pod does not exist yet.
            found[who] = dict.fromkeys(doors, False)
            continue
        opened = json.loads(said)
        found[who] = {door: opened[address] for door, address in doors.items()}
    return found


def differences(found: Mapping[str, Mapping[str, bool]], wanted: Doors) -> list[str]:
    """Return the wrong results. A policy cannot close a pod's way to itself."""
    return [
        f"{who} -> {door}: {'open' if is_open else 'closed'}"
        for who, doors in found.items()
        for door, is_open in doors.items()
        if is_open is not (door in wanted[who]) and not door.startswith(f"{who}:")
    ]


def print_table(what: str, found: Mapping[str, Mapping[str, bool]]) -> int:
    """Print a table; return 1 if a result is wrong."""
    is_wrong = "WRONG" in found
    doors = list(next(iter(found.values())))
    sys.stdout.write(
        f"\n{what}\n\n| from | {' | '.join(doors)} |\n|{' --- |' * (len(doors) + 1)}\n"
    )
    for who, opened in found.items():
        if opened:
            cells = ["open" if opened[door] else "-" for door in doors]
            sys.stdout.write(f"| {who} | {' | '.join(cells)} |\n")
    sys.stdout.flush()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
