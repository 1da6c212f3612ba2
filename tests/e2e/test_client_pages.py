"""The blocks of the pages for clients are regions of programs, which run here.

The server has TLS and its security on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.conftest import Certificates
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    RUST_PROGRAM,
    SCRIPTS,
    needs,
)
from tests.support.processes.processes import Standalone, standalone

PAGES = Path(__file__).parents[2] / "docs" / "clients"
RUN_S = 120.0  # more than twice the time of each program on the slowest machine
JAVA = ["java", "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Guide"]
REGION = re.compile(
    r"^[ \t]*(?://|#) region: (\w+)\n(.*?)^[ \t]*(?://|#) end$", re.MULTILINE | re.DOTALL
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What each program prints, in any order. The Rust client has no push consumer.
SIMPLE = {"step first", "step second", "stopped"}
PUSHED = {"done one coffee", "attempt 1 failed: poison", "attempt 2 failed: poison"}
ALL = SIMPLE | PUSHED | {"dead letter poison"}


class Guide(NamedTuple):
    """The program of a page."""

    page: str
    language: str  # of the blocks
    source: str
    command: Sequence[str]
    printed: set[str]


PYTHON = Guide(
    "python",
    "python",
    "../../examples/client_guide.py",
    [sys.executable, "../../examples/client_guide.py"],
    ALL,
)
GUIDES = [pytest.param(PYTHON, id="python")]
OTHERS = [
    (
        Guide("go", "go", "go/guide.go", [str(GO_PROGRAM), "guide", "{}"], ALL),
        [needs("go", GO_PROGRAM)],
    ),
    (Guide("java", "java", "java/src/Guide.java", JAVA, ALL), [needs("java", JAVA_CLASSES)]),
    (
        Guide("node", "js", "node/guide.mjs", ["node", "node/guide.mjs"], ALL),
        [needs("node", NODE_PACKAGES)],
    ),
    (
        Guide("rust", "rust", "rust/src/guide.rs", [str(RUST_PROGRAM), "guide"], SIMPLE),
        [needs("cargo", RUST_PROGRAM), pytest.mark.large],
    ),
]
GUIDES += [pytest.param(guide, id=guide.page, marks=marks) for guide, marks in OTHERS]


class Shop(NamedTuple):
    """A standalone with TLS and users, and the secret of the user `shop`."""

    running: Standalone
    secret: str


@pytest.fixture
def shop(tmp_path: Path, certificates: Certificates) -> Iterator[Shop]:
    served = [f"--{name.replace('_', '-')}={file}" for name, file in certificates.served.items()]
    with standalone(tmp_path / "data", "--tls=optional", *served) as running:

        def tidemill(*arguments: str) -> str:
            line = [sys.executable, "-m", "tidemill", "--admin", running.admin, *arguments]
            done = subprocess.run(
                [*line, "-o", "json"],
                env={"HOME": str(tmp_path)},
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_S,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        tidemill("security", "enable")
        made = tidemill(
            "user",
            "create",
            "shop",
            "--producer=orders",
            "--producer=reminders",
            "--producer=steps",
            "--consumer=billing:orders",
            "--consumer=steps:steps",
            "--consumer=letters:orders",
        )
        file = tmp_path / "definitions.yaml"
        file.write_text(
            """
            topics:
              - {name: orders}
              - {name: reminders, messageType: DELAY}
              - {name: steps, messageType: FIFO}
            groups:
              - {name: billing, maxAttempts: 2, retry: {customized: {nextMs: [1000]}}}
              - {name: steps, deliveryOrder: FIFO}
              - {name: letters}
            """
        )
        tidemill("definitions", "apply", str(file), "--yes")
        yield Shop(running, json.loads(made)["secret"])


@pytest.mark.parametrize("guide", GUIDES)
def test_the_program_of_a_page_runs(
    shop: Shop, tmp_path: Path, certificates: Certificates, guide: Guide
) -> None:
    variables = {
        "ENDPOINT": shop.running.grpc,
        "ACCESS_KEY": "shop",
        "ACCESS_SECRET": shop.secret,
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": certificates.authority,
        "HOME": str(tmp_path),
        "JAVA_TOOL_OPTIONS": f"-Duser.home={tmp_path}",
    }
    done = subprocess.run(
        guide.command,
        cwd=SCRIPTS,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    printed = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert guide.printed <= set(printed), done.stdout + done.stderr
    assert printed.index("step first") < printed.index("step second")
    assert any(line.startswith("sent ") for line in printed)


@pytest.mark.parametrize(
    "guide", [PYTHON, *(guide for guide, _ in OTHERS)], ids=lambda one: one.page
)
def test_the_blocks_of_a_page_are_the_regions_of_its_program(guide: Guide) -> None:
    source = (SCRIPTS / guide.source).read_text("utf-8")
    regions = [textwrap.dedent(body).strip() for _, body in REGION.findall(source)]
    page = (PAGES / f"{guide.page}.md").read_text("utf-8")
    blocks = [body.strip() for language, body in BLOCK.findall(page) if language == guide.language]
    assert sorted(blocks) == sorted(regions)


@pytest.mark.parametrize("page", ["cpp", "csharp"])
def test_a_page_of_a_client_that_no_test_runs_says_so(page: str) -> None:
    words = (PAGES / f"{page}.md").read_text("utf-8").split()
    assert "No test runs this client." in " ".join(words)
