"""compose.yaml: its commands run as processes, with the ports and addresses of the test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUN_S = 60.0


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Start the broker's service with its own flags, on loopback."""
    program, data_dir, *flags = services()["tidemill"]["command"]
    assert (program, data_dir) == ("standalone", "--data-dir=/data")
    here = [flag.replace("=0.0.0.0", "=127.0.0.1") for flag in flags]
    with standalone(tmp_path_factory.mktemp("compose") / "data", *here) as started:
        yield started


def at_test(text: str, running: Standalone) -> str:
    """Replace the addresses of the network of containers."""
    return text.replace("tidemill:8081", running.grpc).replace(
        "http://tidemill:8080", running.admin
    )


def start(running: Standalone, name: str, words: Sequence[str], output: Path) -> Any:
    given = services()[name]["environment"]
    variables = {key: at_test(str(value), running) for key, value in given.items()}
    with output.open("w") as file:
        return subprocess.Popen(
            words,
            cwd=EXAMPLES,
            env=environment() | {"PYTHONUNBUFFERED": "1", "HOME": str(output.parent)} | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait(RUN_S)


def test_a_reminder_of_the_web_application_reaches_the_worker(
    running: Standalone, tmp_path: Path
) -> None:
    all_services = services()
    mount, _, inside = all_services["definitions"]["volumes"][0].removesuffix(":ro").partition(":")
    words = [str(ROOT / mount) if word == inside else word for word in _words("definitions")]
    output = tmp_path / "definitions"
    defining = start(running, "definitions", command(*words), output)
    with ended(defining):
        assert defining.wait(RUN_S) == 0, output.read_text()
    assert running.get("topics/reminders")["messageType"] == "DELAY"

    python, program = _words("worker")
    assert python == "python"
    server, *arguments = _words("web")
    here = [re.sub("^--port=.*", "--port=0", word) for word in arguments]
    here = [word.replace("=0.0.0.0", "=127.0.0.1") for word in here]
    log, printed = tmp_path / "web", tmp_path / "worker"
    with ExitStack() as stack:
        stack.enter_context(
            ended(start(running, "web", [sys.executable, "-m", server, *here], log))
        )
        worker = start(running, "worker", [sys.executable, program], printed)
        stack.enter_context(ended(worker))
        address = eventually(lambda: re.search(r"http://127[0-9.:]+", log.read_text()))
        assert isinstance(address, re.Match)
        with httpx.Client(base_url=address[0], trust_env=False, timeout=RUN_S) as web:
            answer = web.put("/reminders/tea", json={"text": "tea", "in_seconds": 1})
            assert answer.json() == {"key": "tea", "state": "scheduled"}
        eventually(lambda: "at attempt 1" in printed.read_text())
        worker.terminate()
        assert worker.wait(RUN_S) == 0
        assert printed.read_text().splitlines()[-1] == "stopped"


def _words(name: str) -> list[str]:
    found: list[str] = services()[name]["command"]
    return found


def test_other_containers_reach_the_rest_api_by_the_name_of_the_service(
    running: Standalone,
) -> None:
    with httpx.Client(base_url=running.admin, trust_env=False) as client:
        statuses = [
            client.get("/api/v1/topics", headers={"Host": host}).status_code
            for host in ("tidemill:8080", "other:8080")
        ]
    assert statuses == [httpx.codes.OK, httpx.codes.MISDIRECTED_REQUEST]


def test_the_health_check_needs_a_ready_proxy_and_admin_process(running: Standalone) -> None:
    word, python, option, code = services()["tidemill"]["healthcheck"]["test"]
    assert (word, python, option) == ("CMD", "python3", "-c")
    ports = [urlsplit(running.processes[name].metrics).port for name in ("proxy-0", "admin")]

    def status(these: Sequence[object]) -> int:
        # The metrics ports of a standalone follow that of the broker, 5557.
        here = code.replace("(5558, 5559)", repr(tuple(these)))
        return subprocess.run([sys.executable, "-c", here], check=False, timeout=RUN_S).returncode

    assert "(5558, 5559)" in code
    assert status(ports) == 0
    assert status([ports[0], 1]) == 1


def test_containers_are_reachable_from_this_machine_alone_and_start_in_order() -> None:
    given = services()
    published = [port for service in given.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    for service in given.values():
        for name, how in service.get("depends_on", {}).items():
            assert name in given
            assert how["condition"] != "service_healthy" or "healthcheck" in given[name]


def test_the_image_of_the_applications_has_the_tested_versions() -> None:
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    dockerfile = (EXAMPLES / "compose" / "Dockerfile").read_text("utf-8")
    pinned = re.findall(r"([a-z-]+==[0-9.]+)", dockerfile)
    assert len(pinned) == len(("client", "fastapi", "httpx", "uvicorn"))
    assert [one for one in pinned if f"\n{one} " not in lock] == []
    for source in re.findall(r"^COPY (\S+)", dockerfile, re.MULTILINE):
        assert (EXAMPLES / source).exists()
