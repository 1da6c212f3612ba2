"""The chart, rendered without a cluster by the Helm that `make` builds."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.http_server import PatientHTTPServer

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "charts" / "tidemill"
HELM = ROOT / "tests" / "chart" / "helm" / "build" / "helm"
KUBERNETES = "1.33"  # version of the types in tests/chart/kubernetes-types.json.gz
NAMESPACE = "messages"
RENDER_S = 60.0  # on a busy machine; usually a tenth of a second

Object = dict[str, Any]


def need_helm() -> None:
    """Skip a test if Helm is not built. Fail in CI."""
    if not HELM.exists():
        assert "CI" not in os.environ, "make tool-helm"
        pytest.skip("helm is not built: make tool-helm")


def helm_template(
    *arguments: str | Path, release: str = "tidemill"
) -> subprocess.CompletedProcess[str]:
    """Render the chart with these values."""
    return subprocess.run(
        [
            HELM,
            "template",
            release,
            CHART,
            "--namespace",
            NAMESPACE,
            "--kube-version",
            KUBERNETES,
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=RENDER_S,
        env={"PATH": "", "HOME": "/nonexistent"},
    )


def rendered(*arguments: str | Path, release: str = "tidemill") -> str:
    """Return the manifests; fail with Helm's error."""
    done = helm_template(*arguments, release=release)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered_beside(
    standing: list[Object], folder: Path, *arguments: str | Path, forbidden: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Render the chart for a cluster with these existing objects.

    The API server refuses to show kinds whose plural is in `forbidden`.
    """
    with _api_server(standing, forbidden) as address:
        config = folder / "kubeconfig"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": address}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "users": [{"name": "u", "user": {}}],
                    "current-context": "c",
                }
            ),
            "utf-8",
        )
        return helm_template("--dry-run=server", f"--kubeconfig={config}", *arguments)


@contextmanager
def _api_server(standing: list[Object], forbidden: tuple[str, ...]) -> Iterator[str]:
    """Answer the `lookup` calls of templates as the Kubernetes API does; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if {*forbidden} & {*path.split("/")}:
                status, body = 403, {"kind": "Status", "reason": "Forbidden", "code": 403}
            else:
                status, body = _answer(standing, path)
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with PatientHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# Kinds that templates look up: (version, kind, plural).
LOOKED_UP = (
    ("v1", "ConfigMap", "configmaps"),
    ("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ("v1", "Secret", "secrets"),
    ("apps/v1", "StatefulSet", "statefulsets"),
    ("apps/v1", "Deployment", "deployments"),
    ("tidemill.io/v1", "BrokerGroup", "brokergroups"),
)


def _answer(standing: list[Object], path: str) -> tuple[int, Object]:
    if path == "/version":
        return 200, {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    for version in {version for version, _, _ in LOOKED_UP}:
        root = f"/{'apis' if '/' in version else 'api'}/{version}"
        kinds = [(kind, plural) for of, kind, plural in LOOKED_UP if of == version]
        if path == root:
            resources = [
                {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
                for kind, plural in kinds
            ]
            return 200, {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": resources,
            }
        for kind, plural in kinds:
            found = [
                {"apiVersion": version, **one, "kind": kind}
                for one in standing
                if one["kind"] == kind
            ]
            all_of_them = f"{root}/namespaces/{NAMESPACE}/{plural}"
            if path == all_of_them:
                return 200, {"apiVersion": version, "kind": f"{kind}List", "items": found}
            for one in found:
                if path == f"{all_of_them}/{one['metadata']['name']}":
                    return 200, one
    return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}


def refusal(*values: str) -> str:
    """Return Helm's error for invalid values."""
    done = helm_template(*(part for value in values for part in ("--set", value)))
    assert done.returncode != 0, f"{values} were taken"
    return done.stderr


def objects(*arguments: str | Path, release: str = "tidemill") -> list[Object]:
    """Return the objects that the chart renders."""
    text = rendered(*arguments, release=release)
    return [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one is not None]


def find(found: list[Object], kind: str, name: str) -> Object:
    """Return the object of this kind and name."""
    [one] = [o for o in found if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return one


def pod_of(one: Object) -> Object:
    """Return the pod's fields of a workload."""
    spec: Object = one["spec"]
    if one["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    found: Object = spec if one["kind"] == "Pod" else spec["template"]["spec"]
    return found


WORKLOADS = ("StatefulSet", "Deployment", "Job", "CronJob", "Pod")
