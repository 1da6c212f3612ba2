"""The cluster for faults: kubectl and helm for one namespace, and the hook program.

KUBECONFIG selects the cluster. The program in CLUSTER_FAULTS runs faults below Kubernetes
(tests/chaos/hooks/README.md). Without the program, such faults do not run.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.eventually import eventually
from tidemill.common.exit_codes import EXIT_PARTIAL

COMMAND_S = 60.0  # For one kubectl, with an API server that has just started.
HOOK_S = 120.0  # For a node to start.
INSTALL_S = 600  # For claims, images and first starts.
SETTLED_S = 300.0  # For recovery: the pods of a lost node alone need some minutes.
LOOK_EVERY_S = 0.5  # Each check runs kubectl, which costs a tenth of a second of CPU.
RELEASE = "tidemill"
CHART = Path(__file__).parents[2] / "charts" / "tidemill"
VALUES = Path(__file__).parent / "values.yaml"
COMPONENTS = ("broker", "proxy", "admin", "controller")
NOT_HERE = 3  # The hook program's status for an unsupported fault.


class FaultUnavailable(Exception):
    """A fault cannot run on this cluster. Its row has the reason."""


class Pod(NamedTuple):
    """The state of a pod at the time of the request."""

    name: str
    component: str
    node: str
    container: str
    is_ready: bool
    uid: str
    restarts: int

    @property
    def life(self) -> tuple[str, int]:
        """Identity of the container. A replacement has another one."""
        return self.uid, self.restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One namespace of a cluster, with or without its release."""

    namespace: str
    image: str
    hook_program: str = ""
    layout_values: str = ""  # Values file of a fault that needs another layout.
    more_values: str = ""  # Values file with the placement on this cluster.

    def kubectl(self, *arguments: str, given: str = "", within_s: float = COMMAND_S) -> str:
        """Return the output of kubectl; raise AssertionError with its error text."""
        return output_of(["kubectl", "-n", self.namespace, *arguments], given, within_s)

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the items of a list."""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", *arguments, "-o", "json"))[
            "items"
        ]
        return items

    @contextlib.contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """Forward a port of the namespace for the block; yield the local host and port."""
        command = ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding:
            try:
                assert forwarding.stdout is not None
                readable, _, _ = select.select([forwarding.stdout], [], [], COMMAND_S)
                line = forwarding.stdout.readline() if readable else ""
                found = re.match(r"Forwarding from (127\.0\.0\.1:\d+) ", line)
                assert found is not None, f"{' '.join(command)}: {line}"
                yield found[1]
            finally:
                forwarding.terminate()

    # ------------------------------------------------------------------ the release

    def create(self) -> None:
        """Create the namespace, which must not exist."""
        there = output_of(["kubectl", "get", "namespace", self.namespace, "--ignore-not-found"])
        if there:
            raise SystemExit(f"namespace {self.namespace} is there already: name another one")
        output_of(["kubectl", "create", "namespace", self.namespace])

    def remove(self) -> None:
        """Delete the namespace with all its objects."""
        output_of(["kubectl", "delete", "namespace", self.namespace], within_s=SETTLED_S)

    def helm(
        self,
        verb: str,
        *more_files: str,
        values: Mapping[str, str] | None = None,
        wait_s: int = INSTALL_S,
    ) -> None:
        """Install or upgrade the release with additional values."""
        repository, _, tag = self.image.rpartition(":")
        sets = {"image.repository": repository, "image.tag": tag, **(values or {})}
        files = [str(VALUES), self.layout_values, self.more_values, *more_files]
        output_of(
            [
                "helm",
                "-n",
                self.namespace,
                verb,
                RELEASE,
                str(CHART),
                *(f"--values={file}" for file in files if file),
                *(f"--set-string={name}={value}" for name, value in sets.items()),
                # Values of an earlier upgrade remain: removing them would also replace its pods.
                *(["--reuse-values"] if verb == "upgrade" else []),
                "--wait",
                f"--timeout={wait_s}s",
            ],
            within_s=2 * INSTALL_S,
        )

    def roll_back(self) -> None:
        """Roll the release back to the revision before."""
        output_of(
            [
                "helm",
                "-n",
                self.namespace,
                "rollback",
                RELEASE,
                "--wait",
                f"--timeout={INSTALL_S}s",
            ],
            within_s=2 * INSTALL_S,
        )

    def tidemill(self, *arguments: str) -> Any:
        """Run a command line in the admin process; return the JSON that it prints.

        The answer may lack the part of an unreachable broker group.
        """
        inside = ("exec", "deployment/tidemill-admin", "--", "tidemill", "-o", "json")
        command = ["kubectl", "-n", self.namespace, *inside, *arguments]
        return json.loads(output_of(command, accepted=(0, EXIT_PARTIAL)))

    def pods(self, component: str = "") -> list[Pod]:
        """Return the pods of all processes, or of one component, that are not terminating."""
        labels = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component"
        which = f"{labels}={component}" if component else f"{labels} in ({','.join(COMPONENTS)})"
        return [
            pod_of(item)
            for item in self.objects("pods", "-l", which)
            if "deletionTimestamp" not in item["metadata"]
        ]

    def is_settled(self) -> bool:
        """Return whether all pods exist, have the newest revision and are ready."""
        wanted = self.objects(
            "deployments,statefulsets", "-l", f"app.kubernetes.io/instance={RELEASE}"
        )
        pods = self.pods()
        return (
            len(pods) == sum(item["spec"]["replicas"] for item in wanted)
            and all(pod.is_ready for pod in pods)
            and all(
                item["status"].get("observedGeneration") == item["metadata"]["generation"]
                and item["status"].get("updatedReplicas", 0) == item["spec"]["replicas"]
                for item in wanted
            )
        )

    def settle(self, *former: Pod) -> None:
        """Wait until the release is complete and all former containers are replaced."""
        gone = {pod.life for pod in former}
        eventually(
            lambda: self.is_settled() and not gone & {pod.life for pod in self.pods()},
            within_ms=int(SETTLED_S * 1000),
            every_s=LOOK_EVERY_S,
        )

    def events(self) -> str:
        """Return the namespace's Kubernetes events, one per line, the oldest first."""
        fields = ".firstTimestamp,.lastTimestamp,.count,.involvedObject.name,.reason,.message"
        columns = ",".join(f"{field.rpartition('.')[2]}:{field}" for field in fields.split(","))
        return self.kubectl(
            "get", "events", "--sort-by=.lastTimestamp", "-o", f"custom-columns={columns}"
        )

    # ------------------------------------------------------------------ faults

    def kill_pods(self, pods: Sequence[Pod]) -> None:
        """Delete pods without a grace period: SIGKILL at once."""
        names = [pod.name for pod in pods]
        self.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--wait=false")

    def hook(self, *arguments: str) -> None:
        """Run a fault below Kubernetes."""
        if not self.hook_program:
            raise FaultUnavailable("CLUSTER_FAULTS names no program")
        done = subprocess.run(
            [self.hook_program, *arguments],
            capture_output=True,
            text=True,
            timeout=HOOK_S,
            check=False,
        )
        if done.returncode == NOT_HERE:
            raise FaultUnavailable(done.stderr.strip() or "CLUSTER_FAULTS cannot do it")
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"

    def signal(self, signal: str, pod: Pod) -> None:
        """Signal the first process of a container from outside."""
        self.hook("signal", signal, self.namespace, pod.name, pod.container)


Act = Callable[[Cluster], None]  # a change or a fault; returns once the release is complete again


def pod_of(item: dict[str, Any]) -> Pod:
    """Parse a pod of `kubectl get -o json`."""
    statuses = item["status"].get("containerStatuses", [])
    conditions = {one["type"]: one["status"] for one in item["status"].get("conditions", [])}
    return Pod(
        name=item["metadata"]["name"],
        component=item["metadata"]["labels"]["app.kubernetes.io/component"],
        node=item["spec"].get("nodeName", ""),
        container=item["spec"]["containers"][0]["name"],
        is_ready=conditions.get("Ready") == "True",
        uid=item["metadata"]["uid"],
        restarts=sum(status["restartCount"] for status in statuses),
    )


def output_of(
    command: Sequence[str],
    given: str = "",
    within_s: float = COMMAND_S,
    accepted: Sequence[int] = (0,),
) -> str:
    """Return the standard output of a program; raise AssertionError if it fails."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(str(late)) from None
    assert done.returncode in accepted, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
    return done.stdout


def hold(seconds: float) -> None:
    """Wait for the duration of a fault."""
    time.sleep(seconds)
