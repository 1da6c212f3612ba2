"""One supervised process: started, announced, started again when it dies.

The two share a socket pair (see `tidemill.common.lifecycle`). The child's line on it says that it
serves; its end says that the child is dead. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import structlog

BACK_OFF_MS_MIN = 200  # before the first restart
BACK_OFF_MS_MAX = 2_000  # between later ones: a cause that has gone is not waited for long
STEADY_MS = 30_000  # who ran that long starts with the least back-off again

log = structlog.get_logger()

Addresses = dict[str, str]


class ChildFailure(Exception):
    """A process ended before it served; it has said why on standard error."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} could not start (status {status})")
        self.status = status


class Child:
    """A process that is kept running."""

    def __init__(self, name: str, arguments: Callable[[Addresses], Sequence[str]]) -> None:
        """Take the command line as a function of the addresses that the child had before.

        So a port that was picked freely at the first start is asked for by number at the next.
        """
        self.name = name
        self._arguments = arguments
        self.addresses: Addresses = {}
        self.serving_pid = 0  # who has announced itself: a replica's broker has a supervisor
        self.is_ready = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._serves = False  # now, while `is_ready` stays set when it dies
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """The process's id, 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Start the process, and again whenever it dies; return once it is stopped.

        Raises ChildFailure when the very first start fails.
        """
        loop = asyncio.get_running_loop()
        back_off_ms = BACK_OFF_MS_MIN
        while True:
            started_s = loop.time()
            status = await self._run_once()
            if self._is_stopping:
                return
            if not self.is_ready.is_set():
                raise ChildFailure(self.name, status)
            if loop.time() - started_s > STEADY_MS / 1000:
                back_off_ms = BACK_OFF_MS_MIN
            log.warning("child died", child=self.name, status=status, restart_ms=back_off_ms)
            # Jitter: several that died of one cause do not come back in step.
            await asyncio.sleep(back_off_ms * random.uniform(0.8, 1.2) / 1000)
            back_off_ms = min(2 * back_off_ms, BACK_OFF_MS_MAX)

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = (*self._arguments(self.addresses), f"--supervisor-fd={fd}")
            self._process = subprocess.Popen(  # noqa: ASYNC220  # A fork of a small process.
                [sys.executable, "-m", "tidemill", *command],
                pass_fds=(fd,),
                # A ^C is for the supervisor, which stops the others in order.
                process_group=0,
                stdin=subprocess.DEVNULL,
                # Standard output carries the ready line and nothing else.
                stdout=sys.stderr.fileno(),
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            if line := await reader.readline():
                ready = json.loads(line)
                self.serving_pid = ready["pid"]
                self.addresses = {
                    key: value for key, value in ready.items() if key not in {"event", "pid"}
                }
                self._serves = True
                self.is_ready.set()
                await reader.read()
        except ConnectionError:
            pass  # As good as the end of file.
        finally:
            self._serves = False
            writer.close()
        # Its descriptors are closed, so it has ended or is about to.
        status = self._process.wait()
        self._process = None
        return status

    def stop(self) -> None:
        """Ask the process to stop, and do not start it again."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)

    def reload(self) -> None:
        """Let the process read its certificates again."""
        if self._serves:  # One that starts may not know the signal yet, and reads anyway.
            self._signal(signal.SIGHUP)

    def kill(self) -> None:
        """End the process at once."""
        self._is_stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
