"""The work of a process before it serves and at its end: others wait for both."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes.processes import START_S, STOP_S, environment

# Prints the modules of each process of ours at its end, also of one that is forked.
SCRIPT = """
import atexit, json, os, sys

def report():
    os.write(1, (json.dumps({"pid": os.getpid(), "modules": sorted(sys.modules)}) + "\\n").encode())

atexit.register(report)
from tidemill.__main__ import main
main()
"""
# Prints the number of garbage collections during the imports of a broker, and of its threads.
IMPORTS = """
import gc, os, sys
from tidemill.__main__ import shorten_start

shorten_start("broker")
before = [one["collections"] for one in gc.get_stats()]
import tidemill.common.log
from tidemill.broker.settings import BrokerSettings
import tidemill.broker.app, tidemill.broker.store_life

BrokerSettings.load(["--data-dir=unused"])
after = [one["collections"] for one in gc.get_stats()]
print(sum(after) - sum(before), len(os.listdir("/proc/self/task")))
"""
# Prints a line if the process destroys its objects at its end.
TEARDOWN = """
import os

class Witness:
    write = staticmethod(os.write)

    def __del__(self):
        self.write(1, b"destroyed")

witness = Witness()
from tidemill.__main__ import main
main()
"""
# The command line, the admin process and the jobs of a release need these.
OTHERS = {
    "click",
    "cryptography",
    "fastapi",
    "grpc",
    "httpx",
    "pygments",
    "rich",
    "starlette",
    "tidemill.admin",
    "tidemill.cli.app",
    "tidemill.release",
    "tidemill.standalone",
    "tidemill_pipeline",
    "typer",
    "uvicorn",
}
# Only an engine calculates with arrays. `np.unique` and `np.isin` import masked arrays late.
ENGINE = {"numpy", "tidemill.broker.engine.engine", "tidemill.broker.store"}
MASKED_ARRAYS = "numpy.ma"


@dataclass(slots=True)
class Started:
    """A process that serves, and after its end the modules of it and of its forked children."""

    pid: int
    grpc: str
    modules: dict[int, set[str]] = field(default_factory=dict)

    @property
    def own_modules(self) -> set[str]:
        return self.modules[self.pid]


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Started]:
    """Run a process until it serves, and during the block."""
    ours, theirs = socket.socketpair()
    with ours, (folder / f"{arguments[0]}.log").open("a") as stderr:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *arguments, f"--supervisor-fd={theirs.fileno()}"],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(START_S)
        ready = json.loads(ours.recv(4096))
        running = Started(process.pid, ready["grpc"])
        try:
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=STOP_S)
            for line in output.splitlines():
                found = json.loads(line)
                running.modules[found["pid"]] = set(found["modules"])


def imported(modules: set[str], forbidden: set[str]) -> set[str]:
    """Return the forbidden packages that have a module among `modules`."""
    return {one for one in forbidden if any(f"{each}.".startswith(f"{one}.") for each in modules)}


def test_a_broker_and_a_proxy_import_only_what_they_need(tmp_path: Path) -> None:
    ports = ("--grpc-port=0", "--metrics-port=0")
    with (
        started(tmp_path, "broker", f"--data-dir={tmp_path / 'data'}", *ports) as broker,
        started(tmp_path, "proxy", f"--brokers={broker.grpc}", *ports) as proxy,
    ):
        pass
    others = OTHERS | {MASKED_ARRAYS, "tidemill.controller", "tidemill.proxy.app"}
    assert imported(broker.own_modules, others) == set()
    others = OTHERS | ENGINE | {"tidemill.broker", "tidemill.controller"}
    assert imported(proxy.own_modules, others) == set()


def test_a_supervisor_and_a_controller_import_only_what_they_need(tmp_path: Path) -> None:
    ports = ("--grpc-port=0", "--metrics-port=0")
    store = f"--group-store={tmp_path / 'groups'}"
    with (
        started(tmp_path, "controller", store, "--min-in-sync=1", *ports) as controller,
        started(
            tmp_path,
            "broker",
            "--name=broker-0",
            "--replica-id=0",
            f"--controllers={controller.grpc}",
            f"--data-dir={tmp_path / 'data'}",
            *ports,
        ) as supervisor,
    ):
        pass
    others = OTHERS | ENGINE | {"tidemill.controller", "tidemill.proxy.app"}
    assert imported(supervisor.own_modules, others) == set()
    others = OTHERS | ENGINE | {"tidemill.broker", "tidemill.proxy.app"}
    assert imported(controller.own_modules, others) == set()


def test_the_imports_of_a_broker_collect_no_garbage_and_start_no_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env={
            name: value for name, value in environment().items() if name != "OPENBLAS_NUM_THREADS"
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "1"]


def test_a_broker_ends_without_destroying_its_objects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TEARDOWN, "broker", "--data-dir=/proc/none/data"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be used" in done.stderr
