"""The consumer of `examples/` on a connection that passes no bytes any more and does not end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.eventually import eventually
from tests.support.processes.processes import environment, standalone
from tests.support.processes.tcp_links import tcp_links

EXAMPLE = Path(__file__).parents[2] / "examples" / "lasting_consumer.py"
SILENCE_S = 1
END_S = 60.0
SECOND_MS = 180_000  # three times INVISIBLE_S of the example


@contextmanager
def consuming(endpoint: str, folder: Path) -> Iterator[Path]:
    """Run the example for the block; yield the file of its output."""
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), endpoint, f"--silence={SILENCE_S}"],
            env=environment() | {"HOME": str(folder)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield output
    finally:
        process.kill()
        process.wait(END_S)


def send(endpoint: str, body: bytes) -> None:
    async def once() -> None:
        async with api(endpoint) as client:
            await client.send(message("orders", body))

    asyncio.run(once())


@pytest.mark.heavy
def test_the_example_replaces_a_silent_connection(tmp_path: Path) -> None:
    """Without it, the client waits until its system gives the connection up: 16 minutes."""
    with standalone(tmp_path / "data") as running, tcp_links() as links:
        running.put("topics/orders")
        link = links.make(running.grpc)
        with consuming(link.address, tmp_path) as output:
            send(running.grpc, b"first")
            eventually(lambda: " first\n" in output.read_text(), within_ms=SECOND_MS)
            link.strand()
            send(running.grpc, b"second")
            # A poll that waits on the lost connection may take it, for an invisible duration.
            eventually(lambda: " second\n" in output.read_text(), within_ms=SECOND_MS)
            # The example acknowledges a message after its line. If that fails, it comes again.
            eventually(lambda: running.lag("billing") == 0, within_ms=SECOND_MS)
            lines = output.read_text().splitlines()
        assert lines.count("started") > 1, lines
