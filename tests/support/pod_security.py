"""The Pod Security level `restricted` of Kubernetes, as its standard describes it."""

from __future__ import annotations

from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP_TYPES = {"RuntimeDefault", "Localhost"}

Object = dict[str, Any]


def restricted_errors(pod: Object) -> list[str]:
    """Return why the level `restricted` refuses a pod's fields; empty if it accepts them."""
    of_pod: Object = pod.get("securityContext", {})
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    found += [
        f"volume {one['name']}"
        for one in pod.get("volumes", [])
        if not VOLUMES & (one.keys() - {"name"})
    ]
    for container in pod.get("initContainers", []) + pod["containers"]:
        own: Object = container.get("securityContext", {})
        capabilities: Object = own.get("capabilities", {})
        seccomp: Object = own.get("seccompProfile") or of_pod.get("seccompProfile") or {}
        wrong = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True,
            "runAsUser": own.get("runAsUser", of_pod.get("runAsUser")) == 0,
            "seccompProfile": seccomp.get("type") not in SECCOMP_TYPES,
            "capabilities.drop": "ALL" not in capabilities.get("drop", []),
            "capabilities.add": not {*capabilities.get("add", [])} <= {"NET_BIND_SERVICE"},
            "hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {field}" for field, is_wrong in wrong.items() if is_wrong]
    return found
