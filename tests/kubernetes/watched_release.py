"""A check of a release with Prometheus: all pods are found, all panels and alerts have data.

Run it by hand against a cluster (KUBECONFIG). The chart must be installed with
`monitoring.podMonitor` and `monitoring.alerts`:

    python -m tests.kubernetes.watched_release configure NAMESPACE FOLDER [KUBECONFIG]
    prometheus --config.file FOLDER/prometheus.yaml ...        # one that knows Kubernetes
    python -m tests.kubernetes.watched_release check GRPC ADMIN PROMETHEUS

`configure` translates a PodMonitor and PrometheusRules like Prometheus Operator. `check` runs a
load of all features through a proxy (host:port) and the REST API (http://host:port), and sends all
queries to Prometheus (host:port).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.monitoring.test_real_prometheus import DATA_MS, has_data
from tests.support.clients.everything import touch_everything
from tests.support.eventually import eventually
from tests.support.processes.prometheus import SCRAPE_PERIOD, Prometheus

LABEL = "__meta_kubernetes_pod_label_"

Object = dict[str, Any]


class Release:
    """The release as a target of the load."""

    def __init__(self, grpc: str, admin: str) -> None:
        self.grpc = grpc
        self.admin = admin

    def put(self, path: str, **body: object) -> None:
        url = f"{self.admin}/api/v1/{path}"
        httpx.put(url, json=body, trust_env=False).raise_for_status()


def configure(namespace: str, folder: Path, kubeconfig: str = "") -> None:
    """Write prometheus.yaml and rules.yaml from the release's monitors and rules."""
    [monitor] = found("podmonitors", namespace)
    jobs = [
        {
            "job_name": f"{namespace}/{monitor['metadata']['name']}/{endpoint['port']}",
            "kubernetes_sd_configs": [
                {
                    "role": "pod",
                    "namespaces": {"names": [namespace]},
                    **({"kubeconfig_file": kubeconfig} if kubeconfig else {}),
                }
            ],
            "relabel_configs": relabelings(monitor["spec"]["selector"], endpoint),
        }
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    ]
    rules = [
        group for one in found("prometheusrules", namespace) for group in one["spec"]["groups"]
    ]
    period = {"scrape_interval": SCRAPE_PERIOD, "scrape_timeout": SCRAPE_PERIOD}
    configuration = {
        "global": {**period, "evaluation_interval": SCRAPE_PERIOD},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": jobs,
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}), "utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration), "utf-8")


def found(kind: str, namespace: str) -> list[Object]:
    """Return the objects of a kind."""
    output = subprocess.run(
        ["kubectl", "get", kind, "--namespace", namespace, "--output", "json"],
        capture_output=True,
        check=True,
    ).stdout
    items: list[Object] = json.loads(output)["items"]
    return items


def relabelings(selector: Object, endpoint: Object) -> list[Object]:
    """Return the operator's rules for the choice of pods and the names of targets."""
    wanted = dict(selector["matchLabels"])
    for expression in selector["matchExpressions"]:
        wanted[expression["key"]] = "|".join(expression["values"])
    chosen: list[Object] = [
        {"action": "keep", "source_labels": [LABEL + re.sub(r"\W", "_", key)], "regex": value}
        for key, value in wanted.items()
    ]
    port = "__meta_kubernetes_pod_container_port_name"
    chosen.append({"action": "keep", "source_labels": [port], "regex": endpoint["port"]})
    named = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    ]
    own = [
        {
            "source_labels": each["sourceLabels"],
            "target_label": each["targetLabel"],
            "replacement": each["replacement"],
        }
        for each in endpoint["relabelings"]
    ]
    return [*chosen, *named, *own]


def check(grpc: str, admin: str, address: str) -> None:
    """Run the load and all queries."""
    release, asked = Release(grpc, admin), Prometheus(address)
    release.put("topics/orders", messageType="NORMAL", queues=4)
    release.put("groups/billing")
    release.put("groups/undertaker")
    asyncio.run(touch_everything(release))
    eventually(has_data(asked), within_ms=DATA_MS)
    print(f"{asked.ups()} pods are scraped, and every query has data")


def main() -> None:
    """Run the command line."""
    match sys.argv[1:]:
        case ["configure", namespace, folder, *more]:
            configure(namespace, Path(folder), *more)
        case ["check", grpc, admin, address]:
            check(grpc, admin, address)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
