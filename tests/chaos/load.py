"""Official clients in every role in a pod of the cluster, and their reports.

Inside the cluster the clients use service names and service addresses. The pod's clock times the
whole history. The pod stores the reports. Each fetch starts at the end of the previous fetch, so
no report is lost while the API server is down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.chaos.cluster import LOOK_EVERY_S, RELEASE, Cluster
from tests.support.clients.client_process import Fact
from tests.support.clients.looping_clients import US_PER_S, LoopReport, unsettled
from tests.support.clients.message_kinds import BASIC_TOPICS, roles_of
from tests.support.eventually import eventually

POD = "load"
USER = "load"  # of the clients, in a release with users
ENDPOINT = f"{RELEASE}-proxy:8081"
LANGUAGES = ("python", "node", "go", "java")
READY_S = 120.0  # For the image pull and the start of the clients.
PROGRESS = 10  # Stored messages per topic and received messages per role.
# For progress after a fault: if the answer to a push consumer's receive is lost, the delivery comes
# again after a minute. Later messages of the queue follow.
PROGRESS_S = 180.0
# At the end, without a message and with missing acks: longer than the longest wait above. Messages
# without an ack are then lost. A queue with repeated delays needs more time.
DRAIN_S = 120.0
DRAINED_S = 900.0
GONE_S = 90.0  # For a pod to end on a node that was just down.
QUIET_S = 3.0  # At the end, without a message: every repeat has arrived.


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The clients of a load, and the addresses of the proxies."""

    image: str
    languages: Sequence[str] = LANGUAGES
    endpoint: str = ENDPOINT
    user: tuple[str, str] | None = None  # its name and secret; None: calls are not signed


def create_user(cluster: Cluster) -> tuple[str, str] | None:
    """Create the user of the clients and of the audit; None if the release has no users."""
    if cluster.tidemill("security", "status")["inForce"] == "off":
        return None
    rights = ("--producer=*", "--consumer=*:*", "--pipeline=*:*")
    made = cluster.tidemill("user", "create", USER, *rights)
    return USER, made["secret"]


class Load:
    """The pod with the clients, and their reports so far."""

    def __init__(self, cluster: Cluster, name: str, clients: Clients) -> None:
        self._cluster = cluster
        self._name = name
        self._clients = clients
        self._languages = clients.languages
        self._read_bytes = 0
        self._rest = ""
        self._last_received_at = 0  # Also of another load's messages, which may delay this load.
        self.report = LoopReport()

    def start(self) -> None:
        """Start the clients and return once each has each role."""
        manifest = json.dumps(pod_manifest(self._name, self._clients))
        self._cluster.kubectl("apply", "-f", "-", given=manifest)
        self._eventually(lambda: self.report.line_counts["ready"] == len(self._languages), READY_S)
        self.progress()

    def progress(self) -> None:
        """Wait until more messages of each topic are stored and each role has received more."""
        self.read()
        stored = {topic: len(self.report.stored[topic]) + PROGRESS for topic in BASIC_TOPICS}
        roles = roles_of(BASIC_TOPICS)
        received = {role: self.report.received[role] + PROGRESS for role in roles}
        self._eventually(
            lambda: (
                all(len(self.report.stored[topic]) >= stored[topic] for topic in BASIC_TOPICS)
                and all(self.report.received[role] >= received[role] for role in roles)
            ),
            PROGRESS_S,
        )

    def end(self) -> None:
        """Stop the sends and wait for all acks. Messages without an ack are then lost."""
        for language in self._languages:
            self._inside(f"echo stop >/tmp/stop/{language}")
        self._eventually(
            lambda: self.report.line_counts["stopped"] == len(self._languages), READY_S
        )
        self._eventually(
            lambda: not unsettled([self.report]) or self._quiet_s() > DRAIN_S, DRAINED_S
        )
        self._eventually(lambda: self._quiet_s() > QUIET_S, DRAINED_S)

    def now_us(self) -> int:
        """Return the pod's time, which is slightly old on arrival."""
        return int(self._inside("date +%s%6N"))

    def read(self) -> None:
        """Fetch the reports since the last fetch."""
        text = self._inside(f"tail -c +{self._read_bytes + 1} /tmp/facts")
        self._read_bytes += len(text.encode())
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if not line.startswith("{"):
                continue
            told_fact = json.loads(line)
            if told_fact["fact"] == "received":
                self._last_received_at = max(self._last_received_at, told_fact["at"])
            if fact := own(told_fact, self._name):
                self.report.note(fact)

    def _quiet_s(self) -> float:
        return (self.now_us() - self._last_received_at) / US_PER_S

    def _inside(self, line: str) -> str:
        return self._cluster.kubectl("exec", POD, "--", "sh", "-c", line)

    def _eventually(self, check: Any, within_s: float) -> None:
        def checked() -> bool:
            self.read()
            return bool(check())

        try:
            eventually(checked, within_ms=int(within_s * 1000), every_s=LOOK_EVERY_S)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.report}") from None


@contextmanager
def load(cluster: Cluster, name: str, clients: Clients) -> Iterator[Load]:
    """Run clients for the block."""
    running = Load(cluster, name, clients)
    try:
        running.start()
        yield running
    finally:
        # Not by force: a forced deletion returns before the clients end. They would then receive
        # and ack messages of the next load.
        cluster.kubectl("delete", "pod", POD, "--ignore-not-found", within_s=GONE_S)


def own(fact: Fact, name: str) -> Fact | None:
    """Return a fact without the messages of other loads."""
    prefix = f"{name}-"
    if "keys" in fact:
        kept = [
            (key, attempt)
            for key, attempt in zip(fact["keys"], fact["attempts"], strict=True)
            if key.startswith(prefix)
        ]
        keys, attempts = [key for key, _ in kept], [attempt for _, attempt in kept]
        return fact | {"keys": keys, "attempts": attempts} if kept else None
    return fact if fact.get("key", prefix).startswith(prefix) else None


def pod_manifest(name: str, clients: Clients) -> dict[str, Any]:
    """Return the pod: without rights, and if possible on another node than the release."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD, "labels": {"app.kubernetes.io/name": "tidemill-load"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 100,
                            "podAffinityTerm": {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {
                                    "matchLabels": {"app.kubernetes.io/instance": RELEASE}
                                },
                            },
                        }
                    ]
                }
            },
            "containers": [
                {
                    "name": "clients",
                    "image": clients.image,
                    "imagePullPolicy": "IfNotPresent",
                    "args": [name, clients.endpoint, *clients.languages],
                    "env": environment_of(clients),
                    "resources": {"requests": {"cpu": "10m", "memory": "512Mi"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def environment_of(clients: Clients) -> list[dict[str, str]]:
    """Return the variables by which the clients know their user."""
    if clients.user is None:
        return []
    names = ("ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY")
    return [{"name": name, "value": value} for name, value in zip(names, clients.user, strict=True)]
