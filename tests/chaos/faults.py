"""The table of all faults: the action, its requirements, and the permitted effects on clients.

A fault runs `times` times while clients work. Each run lasts until the release is complete again
and every role has made progress. Unless the row has an exception, the promise is the same for all
faults: no message is lost, early, out of order or repeated without a reason, and no application
gets an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.chaos.cluster import LOOK_EVERY_S, Act, Cluster, FaultUnavailable, Pod, hold
from tests.chaos.load import POD as LOAD_POD
from tests.chaos.upgrades import (
    master_of,
    mended_by_rollback,
    release_unchanged,
    replicas_added,
    replicas_scaled,
    replicas_upgraded,
    rolled,
    users_upgraded,
    volumes_expanded,
    volumes_replaced,
)
from tests.support.eventually import eventually

FROZEN_S = 10.0  # Longer than the clients' timeout, shorter than a liveness probe.
AWAY_S = 20.0  # Outage of the API server and of DNS: several leases and lookups.
CUT_S = 70.0  # A node is NotReady after 40 to 50 s. Its pods are not evicted yet.
FULL_S = 20.0  # Duration of a full volume: some timers, retries and checkpoints.
FREED_S = 120.0  # To delete the file that fills the volume.
DRAINED_S = 180  # For `kubectl drain`: the disruption budget waits until other pods are ready.
RESTARTED_S = 60.0  # For the first process of a container to restart its child.
POLICY_S = 20.0  # For the network to enforce a NetworkPolicy.
# More than the volume of values-small-volume.yaml holds. Only this volume is filled: volumes of
# other storage classes may share a disk with other data.
FILLER_BYTES = 1 << 30
FILLER = "/data/store/filler"
RESERVE_LEFT_BYTES = 60 << 20  # Of 64 MiB in values-small-volume.yaml: sends fail.
PROXIES = 5  # One proxy of two per run: clients may use the other one.
DELETIONS = 20  # Deletions of a pod with a promised P99.
SCALES = (6, 2)

# Calls that return errors to the application if the server crashes: no client repeats a receive,
# and only push consumers repeat an ack.
READS = frozenset({"receive", "ack"})
SENDS = frozenset({"normal", "delayed", "ordered"})
# If no broker can store messages for longer than a client retries.
ALL = SENDS | READS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    what: str  # The action, for the page of the ledger.
    act: Act  # Runs the fault; returns once the cluster is complete again.
    fails: frozenset[str] = frozenset()  # Calls whose errors are permitted.
    times: int = 1
    needs: Literal["", "hook", "second node", "hook, second node"] = ""
    promised_s: float | None = None  # P99 of the time without a successful send.
    # The exception, if the promise cannot hold: messages may be lost, all other promises hold.
    loses: str = ""
    values: str = ""  # Values file in this folder, for the fault's own release.


# ---------------------------------------------------------------------- pods


def pods_deleted(component: str, count: int = 1) -> Act:
    """Delete pods by force: Kubernetes kills and replaces them at once."""

    def act(cluster: Cluster) -> None:
        pods = cluster.pods(component)[:count]
        assert len(pods) == count, f"there are only {pods}"
        cluster.kill_pods(pods)
        cluster.settle(*pods)

    return act


def master_deleted(cluster: Cluster) -> None:
    """Delete the master of three replicas by force: another takes over, and it returns."""
    master = master_of(cluster)
    cluster.kill_pods([master])
    cluster.settle(master)
    master_of(cluster)


def master_drained(cluster: Cluster) -> None:
    """Delete the master of three replicas with its grace period: it hands over before it ends."""
    master = master_of(cluster)
    cluster.kubectl("delete", "pod", master.name, "--wait=false")
    cluster.settle(master)
    master_of(cluster)


def pod_drained(component: str) -> Act:
    """Delete a pod with its grace period."""

    def act(cluster: Cluster) -> None:
        pod = cluster.pods(component)[0]
        cluster.kubectl("delete", "pod", pod.name, "--wait=false")
        cluster.settle(pod)

    return act


def process_killed(component: str) -> Act:
    """Kill only the process: the container starts again in the same pod."""

    def act(cluster: Cluster) -> None:
        pod = cluster.pods(component)[0]
        cluster.signal("KILL", pod)
        cluster.settle(pod)

    return act


def process_frozen(component: str) -> Act:
    """Stop a process and continue it after a while."""

    def act(cluster: Cluster) -> None:
        pod = cluster.pods(component)[0]
        cluster.signal("STOP", pod)
        try:
            hold(FROZEN_S)
        finally:
            cluster.signal("CONT", pod)
        cluster.settle()

    return act


def proxy_killed(cluster: Cluster) -> None:
    """Kill the serving process: the first process of its container starts it again."""
    pod = cluster.pods("proxy")[0]
    former = kept_process(cluster, pod)
    cluster.kubectl("exec", pod.name, "--", "sh", "-c", f"kill -KILL {former}")
    eventually(
        lambda: kept_process(cluster, pod) not in ("", former),
        within_ms=int(RESTARTED_S * 1000),
        every_s=LOOK_EVERY_S,
    )
    cluster.settle()


def proxy_frozen(cluster: Cluster) -> None:
    """Stop the serving process and continue it after a while."""
    pod = cluster.pods("proxy")[0]
    serving = kept_process(cluster, pod)
    cluster.kubectl("exec", pod.name, "--", "sh", "-c", f"kill -STOP {serving}")
    try:
        hold(FROZEN_S)
    finally:
        cluster.kubectl("exec", pod.name, "--", "sh", "-c", f"kill -CONT {serving}")
    cluster.settle()


def kept_process(cluster: Cluster, pod: Pod) -> str:
    """Return the process id of a proxy's serving process in its container, "" without one."""
    children = cluster.kubectl("exec", pod.name, "--", "cat", "/proc/1/task/1/children")
    return children.strip()


# ---------------------------------------------------------------------- the release


def proxies_scaled(cluster: Cluster) -> None:
    """Add proxies and then remove them."""
    for replicas in SCALES:
        cluster.kubectl("scale", "deployment/tidemill-proxy", f"--replicas={replicas}")
        cluster.settle()


# ---------------------------------------------------------------------- nodes


def node_of_broker(cluster: Cluster) -> str:
    """Return the node of the broker. The clients must be on another node."""
    [broker, *_] = cluster.pods("broker")
    load = cluster.kubectl("get", "pod", LOAD_POD, "-o", "jsonpath={.spec.nodeName}")
    if load == broker.node:
        raise FaultUnavailable("clients and broker are on one node")
    return broker.node


def on_node(cluster: Cluster, node: str) -> list[Pod]:
    """Return the pods of the release on a node."""
    return [pod for pod in cluster.pods() if pod.node == node]


def node_drained(cluster: Cluster) -> None:
    """Drain the release from a node, as before maintenance, and then allow pods there again."""
    node = node_of_broker(cluster)
    former = on_node(cluster, node)
    # A selector of `kubectl drain` also matches pods of other namespaces.
    mark = f"drained-for={cluster.namespace}"
    cluster.kubectl("label", "pods", *(pod.name for pod in former), mark)
    try:
        cluster.kubectl(
            "drain",
            node,
            f"--pod-selector={mark}",
            f"--timeout={DRAINED_S}s",
            within_s=2 * DRAINED_S,
        )
    finally:
        cluster.kubectl("uncordon", node)
    cluster.settle(*former)


def node_cut(cluster: Cluster) -> None:
    """Disconnect a node's network for long enough that Kubernetes notices."""
    node = node_of_broker(cluster)
    cluster.hook("node", node, "cut")
    try:
        hold(CUT_S)
    finally:
        cluster.hook("node", node, "heal")
    cluster.settle()
    # The proxy has dropped the connections that survive at the clients. The clients notice at
    # their next TCP retransmission, which comes after the same time again.
    hold(CUT_S)


def node_crashed(cluster: Cluster) -> None:
    """Turn a node's power off and on."""
    node = node_of_broker(cluster)
    former = on_node(cluster, node)
    cluster.hook("node", node, "crash")
    cluster.hook("node", node, "start")
    cluster.settle(*former)


def api_server_away(cluster: Cluster) -> None:
    """Disconnect the nodes from the API server for a while."""
    cluster.hook("api-server", "cut", cluster.namespace)
    try:
        hold(AWAY_S)
    finally:
        cluster.hook("api-server", "heal", cluster.namespace)
    cluster.settle()


NO_DNS = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: no-dns}
spec:
  podSelector: {}
  policyTypes: [Egress]
  egress:
    - ports:
        - {protocol: TCP, port: 1, endPort: 52}
        - {protocol: TCP, port: 54, endPort: 65535}
        - {protocol: UDP, port: 1, endPort: 52}
        - {protocol: UDP, port: 54, endPort: 65535}
"""


def dns_away(cluster: Cluster) -> None:
    """Block DNS for all pods of the namespace for a while, with a NetworkPolicy."""
    cluster.kubectl("apply", "-f", "-", given=NO_DNS)
    try:
        wait_for_no_answer(cluster)
        hold(AWAY_S)
    finally:
        cluster.kubectl("delete", "networkpolicy", "no-dns")
    cluster.settle()


def wait_for_no_answer(cluster: Cluster) -> None:
    """Return once DNS lookups fail. Some clusters do not enforce policies."""
    line = "timeout 2 getent hosts kubernetes.default.svc >/dev/null && echo found || echo none"

    def is_none() -> bool:
        return cluster.kubectl("exec", LOAD_POD, "--", "sh", "-c", line).strip() == "none"

    try:
        eventually(is_none, within_ms=int(POLICY_S * 1000), every_s=LOOK_EVERY_S)
    except AssertionError:
        raise FaultUnavailable(
            "no NetworkPolicy is enforced here: DNS answers all the same"
        ) from None


# ---------------------------------------------------------------------- volumes


def volume_filled(left_bytes: int) -> Act:
    """Fill the broker's volume except `left_bytes` with another file, and delete the file."""
    # The free space is unknown. So one file reserves `left_bytes`, a second one fills the volume,
    # and then the first is deleted.
    fill = (
        f"head -c {left_bytes} /dev/zero >{FILLER}.left;"
        f" head -c {FILLER_BYTES} /dev/zero 2>/dev/null >{FILLER}; rm {FILLER}.left; df -k {FILLER}"
    )

    def act(cluster: Cluster) -> None:
        [broker] = cluster.pods("broker")
        inside = ("exec", broker.name, "--", "sh", "-c")
        try:
            output = cluster.kubectl(*inside, fill)
            free_bytes = int(output.splitlines()[-1].split()[3]) << 10
            assert free_bytes <= left_bytes, f"the volume is not full: {output}"
            hold(FULL_S)
        finally:
            # If the broker has crashed, its container is restarting.
            eventually(
                lambda: cluster.kubectl(*inside, f"rm -f {FILLER} {FILLER}.left") == "",
                within_ms=int(FREED_S * 1000),
                every_s=LOOK_EVERY_S,
            )
        cluster.settle()

    return act


def claim_deleted(cluster: Cluster) -> None:
    """Delete the broker's claim with its data and the pod; then provision again."""
    [broker] = cluster.pods("broker")
    cluster.kubectl("delete", "pvc", f"data-{broker.name}", "--wait=false")
    cluster.kill_pods([broker])
    cluster.settle(broker)
    # Topics and consumer groups are deleted too: an upgrade creates those of the values again.
    cluster.helm("upgrade")


FAULTS = (
    Fault(
        name="broker-deleted",
        what="the broker's pod deleted with grace period 0",
        act=pods_deleted("broker"),
        fails=ALL,
        times=DELETIONS,
        promised_s=8.0,
    ),
    Fault(
        name="broker-killed",
        what="the broker's process killed (SIGKILL)",
        act=process_killed("broker"),
        fails=ALL,
        needs="hook",
    ),
    Fault(
        name="broker-frozen",
        what=f"the broker's process stopped for {FROZEN_S:.0f} s (SIGSTOP)",
        act=process_frozen("broker"),
        fails=ALL,
        needs="hook",
    ),
    Fault(
        name="broker-drained",
        what="the broker's pod deleted in order",
        act=pod_drained("broker"),
        fails=ALL,
    ),
    Fault(
        name="broker-rolled",
        what="the broker upgraded",
        act=rolled("broker"),
        fails=ALL,
        promised_s=6.0,
    ),
    Fault(
        name="proxy-deleted",
        what="a proxy's pod deleted with grace period 0",
        act=pods_deleted("proxy"),
        fails=READS,
        times=PROXIES,
    ),
    Fault(
        name="proxy-killed",
        what="a proxy's process killed (SIGKILL)",
        act=proxy_killed,
        fails=READS,
        times=PROXIES,
    ),
    Fault(
        name="proxy-container-killed",
        what="a proxy's container killed, with all its processes (SIGKILL)",
        act=process_killed("proxy"),
        fails=ALL,
        needs="hook",
        times=PROXIES,
    ),
    Fault(
        name="proxy-frozen",
        what=f"a proxy's process stopped for {FROZEN_S:.0f} s (SIGSTOP)",
        act=proxy_frozen,
        fails=ALL,
    ),
    Fault(
        name="proxies-deleted",
        what="both proxies' pods deleted at once with grace period 0",
        act=pods_deleted("proxy", 2),
        fails=ALL,
    ),
    Fault(
        name="proxy-drained",
        what="a proxy's pod deleted in order",
        act=pod_drained("proxy"),
        times=PROXIES,
    ),
    Fault(
        name="proxies-scaled", what="proxies scaled from 2 to 6 and to 2 again", act=proxies_scaled
    ),
    Fault(name="proxies-rolled", what="proxies and admin upgraded", act=rolled("proxy", "admin")),
    Fault(
        name="admin-deleted",
        what="the admin process's pod deleted with grace period 0",
        act=pods_deleted("admin"),
    ),
    Fault(
        name="all-rolled",
        what="everything upgraded at once",
        act=rolled("broker", "proxy", "admin"),
        fails=ALL,
        promised_s=6.0,
    ),
    Fault(
        name="release-unchanged",
        what="an upgrade without a change",
        act=release_unchanged,
        promised_s=2.0,
    ),
    Fault(
        name="volumes-expanded",
        what="the broker's volume enlarged where the storage class can expand",
        act=volumes_expanded,
        promised_s=2.0,
    ),
    Fault(
        name="node-cut",
        what=f"the broker's node without network for {CUT_S:.0f} s",
        act=node_cut,
        fails=ALL,
        needs="hook, second node",
    ),
    Fault(
        name="node-crashed",
        what="the broker's node without power, and started again",
        act=node_crashed,
        fails=ALL,
        needs="hook, second node",
    ),
    # After the other two: the broker moves to another node, maybe to the node of the clients.
    Fault(
        name="node-drained",
        what="the broker's node drained",
        act=node_drained,
        fails=ALL,
        promised_s=8.0,
        needs="second node",
    ),
    Fault(
        name="api-server-away",
        what=f"no node reaches the API server for {AWAY_S:.0f} s",
        act=api_server_away,
        needs="hook",
    ),
    Fault(name="dns-away", what=f"no pod reaches DNS for {AWAY_S:.0f} s", act=dns_away),
    Fault(
        name="volume-full",
        what=f"the broker's volume full but for its reserve for {FULL_S:.0f} s",
        act=volume_filled(RESERVE_LEFT_BYTES),
        # Sends fail. Consumers still receive and ack stored messages.
        fails=SENDS,
        values="values-small-volume.yaml",
    ),
    Fault(
        name="volume-stuffed",
        what=f"the broker's volume without a byte, its reserve taken too, for {FULL_S:.0f} s",
        act=volume_filled(0),
        # Deliveries also fail, as each needs a log record. Acks work while the segment is
        # preallocated. The segment of a new store is not, so the broker may end.
        fails=SENDS | {"receive"},
        values="values-small-volume.yaml",
    ),
    Fault(
        name="claim-deleted",
        what="the broker's pod and its claim deleted",
        act=claim_deleted,
        fails=ALL,
        loses="with one replica all is gone that was not consumed, delayed messages, and"
        " topics and consumer groups, which `helm upgrade` makes again from the values.",
    ),
    Fault(
        name="master-deleted",
        what="the pod of a master of three replicas deleted with grace period 0",
        act=master_deleted,
        times=DELETIONS,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="master-drained",
        what="the pod of a master of three replicas deleted in order",
        act=master_drained,
        times=5,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="users-master-deleted",
        what="the pod of a master of three replicas deleted with grace period 0, with signed calls",
        act=master_deleted,
        times=5,
        promised_s=2.0,
        values="values-users.yaml",
    ),
    Fault(
        name="users-upgraded",
        what="an upgrade that replaces all pods of three replicas, with signed calls, while the"
        " secret of the clients is rotated",
        act=users_upgraded,
        promised_s=2.0,
        values="values-users.yaml",
    ),
    Fault(
        name="replicas-upgraded",
        what="an upgrade that replaces all pods of three replicas",
        act=replicas_upgraded,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="replicas-scaled",
        what="three replicas made five, the last of them master, and three again",
        act=replicas_scaled,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="replicas-added",
        what="one replica made three with a log of 5 GiB, one of them ended in the middle of its"
        " copy, and a rollback to one, which is rejected",
        act=replicas_added,
        promised_s=3.0,
        values="values-one-replica.yaml",
    ),
    Fault(
        name="image-mended",
        what="three replicas upgraded to an image that does not exist, and rolled back",
        act=mended_by_rollback({"image.tag": "missing"}),
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="setting-mended",
        what="three replicas upgraded to a memory limit that ends each broker, and rolled back",
        act=mended_by_rollback(
            {"broker.resources.limits.memory": "40Mi", "broker.resources.requests.memory": "40Mi"}
        ),
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="volumes-replaced",
        what="the volumes of three replicas enlarged where the storage class cannot expand",
        act=volumes_replaced,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
    Fault(
        name="replica-volumes-expanded",
        what="the volumes of three replicas enlarged where the storage class can expand",
        act=volumes_expanded,
        promised_s=2.0,
        values="values-replicas.yaml",
    ),
)
