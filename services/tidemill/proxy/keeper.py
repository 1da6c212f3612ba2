"""The keeper, first process of a proxy: keeps its port open and restarts it at once after a crash.

    start     The keeper starts `tidemill proxy` with the same arguments and a socket pair.
    serve     The proxy sends its listening sockets to the keeper.
    crash     The sockets stay open. New connections wait in the kernel's queue, and the next proxy
              takes over the sockets (ADR 0052).
    too late  If a restarted proxy does not serve in time, the keeper ends it and closes the
              sockets, so that clients connect elsewhere. The next proxy binds the port itself,
              without a time limit.
    give up   If the proxy refuses to start, or ends again and again soon after its start, the
              keeper ends. The platform then restarts the container.
    stop      After SIGTERM, SIGINT or the loss of the terminal, the keeper closes the socket pair
              to stop the proxy. It sends no signal, because the proxy may have received it already
              and would count two.

The keeper imports no server code, so it needs only ten megabytes and rarely fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, final

SERVES_WITHIN_S: Final = 10.0  # of a restart; waiting clients have deadlines of seconds
# If so many proxies in a row end this soon, the platform should see it and slow down restarts. A
# proxy that was killed while it served is no reason: the clients would lose the open port.
SHORT_LIVES_MAX: Final = 6
SHORT_LIFE_S: Final = 2.0  # from the moment at which it serves
SOCKETS_MAX: Final = 64  # more addresses than the name of a host has
_LINE_BYTES_MAX: Final = 1 << 12
_STDIN: Final = 0  # the descriptor
_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# ---------------------------------------------------------------------- in the proxy


class KeeperState(NamedTuple):
    """The sockets and the history that a proxy gets from its keeper at its start."""

    listening: Sequence[int] = ()  # descriptors of the sockets of a former life
    former_lives: int = 0
    former_end: str = ""  # of the last one, such as "signal 9"; "" if there was none


def is_kept(arguments: Sequence[str]) -> bool:
    """Whether the proxy with these arguments already has a keeper or a supervisor."""
    return has_keeper(arguments) or any(one.startswith("--supervisor-fd") for one in arguments)


def has_keeper(arguments: Sequence[str]) -> bool:
    """Whether a keeper has started the proxy with these arguments."""
    return any(one.startswith("--keeper-fd") for one in arguments)


def take_over(keeper_fd: int) -> KeeperState:
    """Return the state that the keeper has for this process."""
    with socket.socket(fileno=os.dup(keeper_fd)) as pair:
        line, listening, _, _ = socket.recv_fds(pair, _LINE_BYTES_MAX, SOCKETS_MAX)
    state = json.loads(line)
    return KeeperState(listening, state["former_lives"], state["former_end"])


def give_to_keep(keeper_fd: int, listening: Sequence[int], *, logs_text: bool) -> None:
    """Report to the keeper that this process serves, with its sockets and its log format."""
    # Another task notices the loss of the keeper.
    with (
        socket.socket(fileno=os.dup(keeper_fd)) as pair,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        report = json.dumps({"logs_text": logs_text, "serves_at_s": time.monotonic()})
        socket.send_fds(pair, [report.encode()], listening)


# ---------------------------------------------------------------------- in the keeper


def keep(arguments: Sequence[str]) -> int:
    """Run the proxy until a stop signal or until it cannot serve. Return its exit status."""
    # Process 1 of a container may ignore its children, but the keeper waits for its own.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    status = _Keeper(arguments).run()
    return status if status >= 0 else 128 - status


@final
class _Keeper:
    """A proxy and its restarts."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._pid = 0
        self._pair = socket.socket()  # to the current proxy
        self._serves = False  # whether the current proxy has reported that it serves
        self._serves_at_s = 0.0  # monotonic; of the current proxy, if it serves
        self._is_late = False  # whether the current proxy was ended because it was too late
        self._listening: Sequence[int] = ()  # sockets that a proxy has sent
        self._is_stopping = False
        self._logs_text = os.isatty(sys.stderr.fileno())  # until the proxy reports
        self._has_terminal = os.isatty(_STDIN)

    def run(self) -> int:
        """Run until the last proxy ends. Return its exit status, or its signal as a negative."""
        lives, short_lives, former_end = 0, 0, ""
        while True:
            self._start(lives, former_end)
            status = self._ended(is_bounded=bool(self._listening))
            self._read_reports()
            if self._is_stopping:
                return status
            former_end = f"signal {-status}" if status < 0 else f"status {status}"
            if self._is_late:
                former_end = f"did not serve within {SERVES_WITHIN_S:.0f} s"
            elif not self._serves and (status >= 0 or not self._listening):
                return status  # It cannot start, and has logged the reason.
            is_short = not self._serves or time.monotonic() - self._serves_at_s < SHORT_LIFE_S
            short_lives = short_lives + 1 if is_short else 0
            if short_lives == SHORT_LIVES_MAX:
                self._log("the proxy ends again and again, and is given up", ended=former_end)
                return status
            lives += 1

    def _start(self, former_lives: int, former_end: str) -> None:
        self._pair.close()
        self._pair, theirs = socket.socketpair()
        self._pair.setblocking(False)
        self._serves = self._is_late = False
        state = json.dumps({"former_lives": former_lives, "former_end": former_end})
        socket.send_fds(self._pair, [state.encode()], self._listening)
        with theirs:
            theirs.set_inheritable(True)
            self._pid = os.posix_spawn(
                sys.executable,
                [
                    *(sys.executable, "-P", "-m", "tidemill", "proxy"),
                    *(*self._arguments, f"--keeper-fd={theirs.fileno()}"),
                ],
                os.environ,
                setpgroup=0,  # Else ^C would reach the proxy twice, because the keeper forwards it.
                setsigmask=(),
            )

    def _ended(self, *, is_bounded: bool) -> int:
        """Wait for the end of the current proxy. Return its status."""
        began_s = time.monotonic()
        while True:
            if is_bounded:
                left_s = began_s + SERVES_WITHIN_S - time.monotonic()
                info = signal.sigtimedwait(_SIGNALS, max(left_s, 0))
                if info is None:
                    is_bounded = False
                    self._read_reports()
                    if not self._serves and not self._is_stopping:
                        self._end_late()
                    continue
                number = info.si_signo
            else:
                number = signal.sigwait(_SIGNALS)
            if number != signal.SIGCHLD:
                self._forward(number)
            elif (status := self._reaped()) is not None:
                return status

    def _forward(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._has_terminal and not os.isatty(_STDIN):
                self._stop()
                return
            self._read_reports()
            if not self._serves:
                return  # A starting proxy may have no handler yet, and reads its files anyway.
            os.kill(self._pid, number)
        elif not self._is_stopping:
            self._stop()
        else:
            # Two signals for the proxy, which got none before: it ends at once.
            for each in (signal.SIGINT, signal.SIGTERM):
                os.kill(self._pid, each)

    def _stop(self) -> None:
        self._is_stopping = True
        with contextlib.suppress(OSError):  # It has ended already.
            self._pair.shutdown(socket.SHUT_RDWR)
        self._read_reports()
        self._forget()  # After the proxy closes its sockets, new connections must fail.

    def _end_late(self) -> None:
        self._is_late = True
        self._forget()
        os.kill(self._pid, signal.SIGKILL)

    def _read_reports(self) -> None:
        """Read the sockets that the proxy has sent, in place of the kept ones."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            line, listening, _, _ = socket.recv_fds(self._pair, _LINE_BYTES_MAX, SOCKETS_MAX)
            if line:
                self._forget()
                report = json.loads(line)
                self._serves, self._listening = True, listening
                self._serves_at_s, self._logs_text = report["serves_at_s"], report["logs_text"]

    def _forget(self) -> None:
        for descriptor in self._listening:
            os.close(descriptor)
        self._listening = ()

    def _reaped(self) -> int | None:
        """Reap all ended children. Return the status of the proxy if it is among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    status = os.waitstatus_to_exitcode(ended[1])
        return status

    def _log(self, event: str, **fields: str) -> None:
        """Write a log line in the format of the proxy. The keeper imports no log library."""
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        event_fields = {
            "event": event,
            "level": "error",
            "process": "keeper",
            "timestamp": at,
            **fields,
        }
        line = json.dumps(event_fields)
        if self._logs_text:
            line = ", ".join([event, *(f"{name}: {field}" for name, field in fields.items())])
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
