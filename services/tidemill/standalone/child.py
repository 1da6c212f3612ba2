"""A supervised process: started, announced, and started again if it dies.

Supervisor and child share a socket pair (see `tidemill.common.lifecycle`). A line from the child
means that it serves. The end of the socket means that the child is dead. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from collections.abc import Callable, Sequence

import structlog

from tidemill.common.forked_process import ForkedProcess
from tidemill.standalone.forks import RunToEnd, fork_child

BACK_OFF_MS_MIN = 200  # before the first restart
BACK_OFF_MS_MAX = 2_000  # before later ones; a solved problem does not cost more time
STEADY_MS = 30_000  # after this run time the back-off starts again at its minimum

log = structlog.get_logger()

Addresses = dict[str, str]


class ChildFailure(Exception):
    """The end of a process before it served; its log on standard error gives the reason."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(
            f"{name} ended with status {status} before it served; its log gives the reason"
        )
        self.status = status


class Child:
    """A process that the supervisor keeps running."""

    def __init__(
        self, name: str, arguments: Callable[[Addresses], Sequence[str]], run_to_end: RunToEnd
    ) -> None:
        """Take the command line as a function of the child's previous addresses.

        So a child that picked a free port asks for the same port at its restart.
        """
        self.name = name
        self._arguments = arguments
        self._run_to_end = run_to_end
        self.addresses: Addresses = {}
        self.serving_pid = 0  # announced; a replica's broker has its own supervisor
        self.is_ready = asyncio.Event()
        self.may_serve = asyncio.Event()  # Until then, a started process only imports.
        self._process: ForkedProcess | None = None
        self._serves = False  # now; `is_ready` stays set after the child dies
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """The id of the process; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Start the process, and again each time it dies; return after `stop`.

        Raises ChildFailure if the first start fails.
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
            # Jitter: children that died of one cause do not restart at the same moment.
            await asyncio.sleep(back_off_ms * random.uniform(0.8, 1.2) / 1000)
            back_off_ms = min(2 * back_off_ms, BACK_OFF_MS_MAX)

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = (*self._arguments(self.addresses), f"--supervisor-fd={fd}")
            self._process = fork_child(self.name, command, fd, self._run_to_end)
        reader, writer = await asyncio.open_connection(sock=ours)
        serving = asyncio.create_task(self._let_serve(writer), name=f"let {self.name} serve")
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
            pass  # Equal to the end of the file.
        finally:
            self._serves = False
            serving.cancel()
            writer.close()
        # The child closed its socket, so it has ended or will end at once.
        status = self._process.wait()
        self._process = None
        return status

    async def _let_serve(self, writer: asyncio.StreamWriter) -> None:
        await self.may_serve.wait()
        writer.write(b"\n")

    def stop(self) -> None:
        """Ask the process to stop, and do not start it again."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)

    def reload(self) -> None:
        """Ask the process to read its certificates again."""
        if self._serves:  # A starting child reads the files anyway.
            self._signal(signal.SIGHUP)

    def kill(self) -> None:
        """End the process at once."""
        self._is_stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
