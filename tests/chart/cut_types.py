"""Make kubernetes-types.json.gz: the types of the kinds that the chart renders, from a cluster.

python -m tests.chart.cut_types        # asks the cluster of KUBECONFIG, through kubectl
"""

from __future__ import annotations

import gzip
import json
import subprocess
from typing import Any

from tests.support.kubernetes_types import FILE

KINDS = {
    "v1": ["ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
    "batch/v1": ["CronJob", "Job"],
    # Of the operator of Prometheus: the cluster must have been taught them.
    "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule", "ServiceMonitor"],
    "networking.k8s.io/v1": ["Ingress", "NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
    "rbac.authorization.k8s.io/v1": ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"],
    "scheduling.k8s.io/v1": ["PriorityClass"],
}


def main() -> None:
    """Write the file."""
    kinds: dict[str, str] = {}
    types: dict[str, Any] = {}
    for version, wanted in KINDS.items():
        path = f"/openapi/v3/{'api' if '/' not in version else 'apis'}/{version}"
        told = subprocess.run(
            ["kubectl", "get", "--raw", path], capture_output=True, check=True
        ).stdout
        schemas = json.loads(told)["components"]["schemas"]
        for name, schema in schemas.items():
            for kind in schema.get("x-kubernetes-group-version-kind", []):
                group = "/".join(part for part in (kind["group"], kind["version"]) if part)
                if group == version and kind["kind"] in wanted:
                    kinds[f"{version} {kind['kind']}"] = name
        waiting = [kinds[f"{version} {kind}"] for kind in wanted]
        while waiting:
            name = waiting.pop()
            if name not in types:
                types[name] = cut(schemas[name])
                waiting += references(types[name])
    text = json.dumps({"kinds": kinds, "types": types}, sort_keys=True)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def cut(schema: Any) -> Any:
    """Return a schema without what people read, and what only servers and kubectl do."""
    if isinstance(schema, list):
        return [cut(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if isinstance(value, dict | list) or key not in {"default", "format", "description"}
        if not key.startswith("x-")
    }
    return {key: cut(value) for key, value in kept.items()}


def references(schema: Any) -> list[str]:
    """Return the names of the types that a type mentions."""
    if isinstance(schema, list):
        return [name for item in schema for name in references(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in references(value)]


if __name__ == "__main__":
    main()
