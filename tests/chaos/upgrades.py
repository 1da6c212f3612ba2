"""Changes of a live release: upgrades, rollbacks, other volumes, more replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.cluster import LOOK_EVERY_S, RELEASE, Act, Cluster, Pod
from tests.chaos.load import ENDPOINT, USER
from tests.chaos.load import POD as LOAD_POD
from tests.support.eventually import eventually

IN_SYNC_S = 120.0  # For a replica to start and to catch up.
# The size of the log. A pod ends while its copy has a size between these parts.
FILLED_BYTES, FILLED_S = 5 << 30, 900.0
CUT_FROM, CUT_BEFORE = 0.2, 0.8
COPIED_S = 600.0
BROKEN_UPGRADE_S = 60  # Until an operator gives up an upgrade that does not get ready.
# The size of all volumes of an upgrade; the chart's is 10Gi.
LARGER = "12Gi"
# The record of the broker group of values-replicas.yaml.
GROUP = ("get", "brokergroup", "tidemill-broker-0", "-o")
PENDING = "status=pending-rollback"
THREE_REPLICAS = Path(__file__).with_name("values-replicas.yaml")
FIVE_REPLICAS = Path(__file__).with_name("values-five-replicas.yaml")


def master_of(cluster: Cluster) -> Pod:
    """Return the pod of the recorded master, once all replicas are in sync."""
    replicas_known(cluster, "0 1 2")
    master = cluster.kubectl(*GROUP, "jsonpath={.status.master}").strip()
    [found] = [pod for pod in cluster.pods("broker") if pod.name == f"tidemill-{master}"]
    return found


def replicas_known(cluster: Cluster, numbers: str, *, within_s: float = IN_SYNC_S) -> None:
    """Wait until exactly these replicas are registered and all of them are in sync."""
    query = "jsonpath={.status.record.replicas[*].replica}|{.status.record.sss[*].replica}"

    def look() -> bool:
        registered, _, in_sync = cluster.kubectl(*GROUP, query).partition("|")
        return registered == numbers == " ".join(sorted(in_sync.split()))

    eventually(look, within_ms=int(within_s * 1000), every_s=LOOK_EVERY_S)


def rolled(*components: str) -> Act:
    """Upgrade the release in a way that replaces every pod of these components."""

    def act(cluster: Cluster) -> None:
        former = [pod for component in components for pod in cluster.pods(component)]
        # Compare ids: a broker's pod keeps its name, and unchanged pods are not replaced.
        marks = {f"{component}.podAnnotations.rolled": former[0].uid for component in components}
        cluster.helm("upgrade", values=marks)
        cluster.settle(*former)

    return act


def users_upgraded(cluster: Cluster) -> None:
    """Replace all pods, and give the user of the clients a second secret meanwhile."""
    # An earlier run may have left two secrets, of which the clients use the newest one.
    cluster.tidemill("user", "rotate", USER, "--force")
    rolled("broker", "proxy", "admin", "controller")(cluster)


def release_unchanged(cluster: Cluster) -> None:
    """Upgrade the release without a change: no pod is replaced."""
    former = cluster.pods()
    cluster.helm("upgrade")
    cluster.settle()
    assert {pod.life for pod in cluster.pods()} == {pod.life for pod in former}


def mended_by_rollback(values: Mapping[str, str]) -> Act:
    """Upgrade three replicas with values that no pod starts with, and roll back."""

    def act(cluster: Cluster) -> None:
        master_of(cluster)
        try:
            cluster.helm("upgrade", wait_s=BROKEN_UPGRADE_S, values=values)
        except AssertionError as failed:
            assert "UPGRADE FAILED" in str(failed), failed  # noqa: PT017  # Not a pytest test.
        # Without an error, Helm has returned before the controllers replaced the first replica.
        eventually(
            lambda: any(pod.component == "broker" and not pod.is_ready for pod in cluster.pods()),
            within_ms=int(IN_SYNC_S * 1000),
            every_s=LOOK_EVERY_S,
        )
        cluster.roll_back()
        cluster.settle()
        master_of(cluster)

    return act


# ---------------------------------------------------------------------- volumes


def volumes_expanded(cluster: Cluster) -> None:
    """Enlarge the volumes where the storage class can expand them: no pod is replaced."""
    [claim, *_] = cluster.objects("pvc")
    storage_class = ("storageclass", claim["spec"]["storageClassName"])
    could = cluster.kubectl("get", *storage_class, "-o", "jsonpath={.allowVolumeExpansion}")
    former = cluster.pods("broker")
    set_expansion(cluster, storage_class, "true")
    try:
        cluster.helm("upgrade", values={"broker.persistence.size": LARGER})
    finally:
        set_expansion(cluster, storage_class, could or "null")
    cluster.settle()
    assert requested_sizes(cluster) == {LARGER}
    assert {pod.life for pod in cluster.pods("broker")} == {pod.life for pod in former}


def set_expansion(cluster: Cluster, storage_class: tuple[str, str], may: str) -> None:
    """Set whether a storage class may expand volumes."""
    cluster.kubectl("patch", *storage_class, "-p", f'{{"allowVolumeExpansion": {may}}}')


def volumes_replaced(cluster: Cluster) -> None:
    """Enlarge the volumes where the storage class cannot: one replica after the other is copied."""
    master_of(cluster)
    cluster.helm("upgrade", values={"broker.persistence.size": LARGER})
    job = cluster.objects("jobs", "-l", "app.kubernetes.io/component=grow")[-1]["metadata"]["name"]
    wait = ("wait", "--for=condition=complete", f"job/{job}", f"--timeout={COPIED_S:.0f}s")
    cluster.kubectl(*wait, within_s=2 * COPIED_S)
    master_of(cluster)
    cluster.settle()
    assert requested_sizes(cluster) == {LARGER}


def requested_sizes(cluster: Cluster) -> set[str]:
    """Return the sizes of all claims."""
    return {claim["spec"]["resources"]["requests"]["storage"] for claim in cluster.objects("pvc")}


# ---------------------------------------------------------------------- replicas


def replicas_upgraded(cluster: Cluster) -> None:
    """Upgrade the release in a way that replaces every replica, by the controllers."""
    master_of(cluster)
    rolled("broker")(cluster)
    master_of(cluster)


def replicas_scaled(cluster: Cluster) -> None:
    """Scale to five replicas, make the last one master, and scale to three again."""
    master_of(cluster)
    cluster.helm("upgrade", str(FIVE_REPLICAS))
    replicas_known(cluster, "0 1 2 3 4")
    transfer = ("tidemill", "broker-group", "transfer", "broker-0", "--to=4")
    cluster.kubectl("exec", "deployment/tidemill-admin", "--", *transfer)
    cluster.helm("upgrade")
    master_of(cluster)
    cluster.settle()


def replicas_added(cluster: Cluster) -> None:
    """Scale a large log from one replica to three, and end a replica in the middle of its copy."""
    fill_log(cluster)
    with ThreadPoolExecutor(1) as beside:
        upgrade = beside.submit(cluster.helm, "upgrade", str(THREE_REPLICAS))
        copied = copied_part(cluster)
        [copying] = [pod for pod in cluster.pods("broker") if pod.name.endswith("-1")]
        cluster.kill_pods([copying])
        # The new pod continues the copy; an emptied log would be shorter.
        eventually(
            lambda: log_end(cluster, 1) > 0 and copying.life not in lives(cluster),
            within_ms=int(COPIED_S * 1000),
            every_s=LOOK_EVERY_S,
        )
        assert log_end(cluster, 1) >= copied, "the copy began again"
        upgrade.result()
    # Helm does not wait for the copies.
    replicas_known(cluster, "0 1 2", within_s=COPIED_S)
    cluster.settle()
    try:
        cluster.roll_back()
    except AssertionError as rejected:
        assert "replicas" in str(rejected), rejected  # noqa: PT017  # Not a pytest test.
    else:
        raise AssertionError("the rollback to one replica was not rejected")
    # Helm leaves a rejected rollback as the pending revision.
    cluster.kubectl("delete", "secret", f"--selector=owner=helm,name={RELEASE},{PENDING}")
    cluster.helm("upgrade", str(THREE_REPLICAS))
    master_of(cluster)
    cluster.settle()


def fill_log(cluster: Cluster) -> None:
    """Store large messages until the log is large."""
    admin = ("exec", "deployment/tidemill-admin", "--", "tidemill")
    cluster.kubectl(*admin, "topic", "create", "filler")
    fill = ("python", "/load/fill.py", ENDPOINT, "filler", str(FILLED_BYTES))
    cluster.kubectl("exec", LOAD_POD, "--", *fill, within_s=FILLED_S)


def copied_part(cluster: Cluster) -> int:
    """Wait until replica 1 has copied a part of the log; return its length in bytes."""

    seen = [0]

    def look() -> bool:
        seen.append(log_end(cluster, 1))
        assert seen[-1] < CUT_BEFORE * FILLED_BYTES, "the copy was faster than this test"
        return seen[-1] > CUT_FROM * FILLED_BYTES

    eventually(look, within_ms=int(COPIED_S * 1000), every_s=LOOK_EVERY_S)
    return seen[-1]


def log_end(cluster: Cluster, replica: int) -> int:
    """Return the end of a replica's log as it last reported it; 0 without a report."""
    status = ("tidemill", "replica", "list", "--output=json")
    try:
        groups = json.loads(cluster.kubectl("exec", "deployment/tidemill-admin", "--", *status))
    except AssertionError:
        return 0  # The upgrade has not replaced the admin process, which knows no controllers.
    ends = {one["replica"]: one["logEnd"] for one in groups["items"][0].get("replicas", [])}
    return int(ends.get(replica) or 0)


def lives(cluster: Cluster) -> set[tuple[str, int]]:
    """Return the identities of the brokers' containers."""
    return {pod.life for pod in cluster.pods("broker")}
