"""The chart's HorizontalPodAutoscaler scales proxies under load without errors at clients.

    KUBECONFIG=... python -m tests.kubernetes.scaled_proxies [--namespace NAME] [--image IMAGE]

It installs the chart into a new namespace, runs the official clients of `make cluster-test` there
and waits for more proxies. Then it stops the clients and waits for fewer proxies. It prints the
state of the autoscaler at each step and the errors of the clients.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.chaos.cluster import LOOK_EVERY_S, Cluster
from tests.chaos.figures import figures
from tests.chaos.load import LANGUAGES, Clients, load
from tests.support.clients.looping_clients import Disturbance
from tests.support.eventually import eventually

# The metrics-server reports, and the autoscaler checks, every 15 s.
SCALED_S = 180.0
# A low target, so that these few clients are a load. Scaling down starts at once.
VALUES = {
    "proxy": {
        "replicas": 1,
        "resources": {"requests": {"cpu": "20m"}},
        "autoscaling": {
            "enabled": True,
            "minReplicas": 1,
            "maxReplicas": 3,
            "targetCPUUtilizationPercentage": 100,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}},
        },
    }
}


def main() -> int:
    """Scale up and down once; the status is 1 if clients saw a broken promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namespace", default="tidemill-scaled")
    parser.add_argument("--image", default="tidemill:dev", help="repository:tag of the processes")
    parser.add_argument("--load-image", default="tidemill-load:dev", help="that of the clients")
    parser.add_argument("--clients", default=",".join(LANGUAGES), help="languages, with commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        values = Path(folder) / "scaled.yaml"
        values.write_text(yaml.safe_dump(VALUES))
        cluster = Cluster(namespace=options.namespace, image=options.image, more_values=str(values))
        cluster.create()
        try:
            cluster.helm("install")
            say(cluster, "installed")
            clients = Clients(image=options.load_image, languages=options.clients.split(","))
            with load(cluster, f"scaled-{time.time_ns() // 1_000_000:x}", clients) as loaded:
                begun = loaded.now_us()
                wait_for(cluster, lambda proxies: proxies > 1)
                cluster.settle()
                say(cluster, "under load")
                loaded.progress()
                disturbance = Disturbance("scaled", begun, loaded.now_us())
                loaded.end()
                found = figures(loaded.report.facts, [disturbance])
            wait_for(cluster, lambda proxies: proxies == 1)
            say(cluster, "without clients")
        finally:
            cluster.remove()
    sys.stdout.write(
        f"{found.stored} stored, {found.lost} lost, errors {found.errors},"
        f" {found.without_send_s[0]} s without a send\n"
    )
    for findings in found.findings.values():
        sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return int(not found.is_clean)


def wait_for(cluster: Cluster, check: Callable[[int], bool]) -> None:
    """Wait until `check` accepts the number of proxies."""
    eventually(
        lambda: check(len(cluster.pods("proxy"))),
        within_ms=int(SCALED_S * 1000),
        every_s=4 * LOOK_EVERY_S,
    )


def say(cluster: Cluster, what: str) -> None:
    """Print the state of the autoscaler."""
    status = json.loads(
        cluster.kubectl("get", "horizontalpodautoscaler", "tidemill-proxy", "-o", "json")
    )["status"]
    metrics = [
        metric["resource"]["current"].get("averageUtilization")
        for metric in status.get("currentMetrics") or []
        if metric and metric.get("type") == "Resource"
    ]
    sys.stdout.write(
        f"{what}: {len(cluster.pods('proxy'))} proxies, wanted {status.get('desiredReplicas')},"
        f" CPU {metrics} %\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
