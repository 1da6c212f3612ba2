"""The first process of a proxy: keeps its port open, and starts it again at once when it dies.

    starts     `tidemill proxy` again, with the same arguments and one end of a socket pair
    serves     the proxy gives the sockets on which it listens
    died       they are still open: who connects waits in the kernel's queue instead of being
               refused, and is served by the next life, which takes them over (ADR 0052)
    is late    a life that does not serve in time is ended, the port with it, so that newcomers are
               led elsewhere; the next one binds the port anew, and may take as long as a first one
    gives up   one that refuses to start, or too many ends: so does this, and the platform starts
               the container again
    stops      after SIGTERM, SIGINT or the loss of the terminal the next end of the proxy is the
               last; it is asked by the end of what this says to it, since a signal that was sent to
               both would count as two

It imports nothing that serves, so that it costs ten megabytes and has little to die of.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, final

SERVES_WITHIN_S: Final = 10.0  # a life after the first; who waits has a deadline of seconds
# A proxy that ends as often has a cause that its platform should see, and slow down.
LIVES_MAX: Final = 6
LIVES_WITHIN_S: Final = 60.0
SOCKETS_MAX: Final = 64  # more addresses than the name of a host has
_LINE_BYTES_MAX: Final = 1 << 12
_SERVES_TEXT, _SERVES_JSON = b"serves, logs text\n", b"serves, logs JSON\n"
_STDIN: Final = 0  # the descriptor
_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# ---------------------------------------------------------------------- in the proxy


class Kept(NamedTuple):
    """What was kept for a proxy by the time it started."""

    listening: Sequence[int] = ()  # descriptors of the sockets of a former life
    former_lives: int = 0
    former_end: str = ""  # of the last of them, such as "signal 9"; "" where there was none


def is_kept(arguments: Sequence[str]) -> bool:
    """Tell whether somebody looks after the proxy with these arguments already."""
    return has_keeper(arguments) or any(one.startswith("--supervisor-fd") for one in arguments)


def has_keeper(arguments: Sequence[str]) -> bool:
    """Tell whether a keeper has started the proxy with these arguments."""
    return any(one.startswith("--keeper-fd") for one in arguments)


def take_over(keeper_fd: int) -> Kept:
    """Return what the keeper has for the proxy that it has started, which is this process."""
    with socket.socket(fileno=os.dup(keeper_fd)) as pair:
        line, listening, _, _ = socket.recv_fds(pair, _LINE_BYTES_MAX, SOCKETS_MAX)
    told = json.loads(line)
    return Kept(listening, told["former_lives"], told["former_end"])


def give_to_keep(keeper_fd: int, listening: Sequence[int], *, logs_text: bool) -> None:
    """Tell the keeper that this process serves, on these sockets, and how its log is written."""
    # The loss of the keeper is noticed elsewhere.
    with (
        socket.socket(fileno=os.dup(keeper_fd)) as pair,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        socket.send_fds(pair, [_SERVES_TEXT if logs_text else _SERVES_JSON], listening)


# ---------------------------------------------------------------------- in the keeper


def keep(arguments: Sequence[str]) -> int:
    """Run the proxy until it is told to stop, or cannot serve; return its exit status."""
    # Process 1 of a container ignores its children, and this one waits for its own.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    status = _Keeper(arguments).run()
    return status if status >= 0 else 128 - status


@final
class _Keeper:
    """One proxy, life after life."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._pid = 0
        self._pair = socket.socket()  # with the proxy of this life
        self._serves = False  # this life, as far as it has been heard
        self._is_late = False  # this life: it was ended for it
        self._listening: Sequence[int] = ()  # sockets of the proxy, as far as they were heard of
        self._is_stopping = False
        self._logs_text = os.isatty(sys.stderr.fileno())  # until the proxy says
        self._has_terminal = os.isatty(_STDIN)

    def run(self) -> int:
        """Return how the last life ended: its exit status, or the signal, negative."""
        ends: deque[float] = deque(maxlen=LIVES_MAX)
        lives, former_end = 0, ""
        while True:
            self._start(lives, former_end)
            status = self._ended(is_bounded=bool(self._listening))
            self._hear()
            if self._is_stopping:
                return status
            former_end = f"signal {-status}" if status < 0 else f"status {status}"
            if self._is_late:
                former_end = f"did not serve within {SERVES_WITHIN_S:.0f} s"
            elif not self._serves and (status >= 0 or not self._listening):
                return status  # It cannot start, and has said why.
            ends.append(time.monotonic())
            if len(ends) == LIVES_MAX and ends[-1] - ends[0] < LIVES_WITHIN_S:
                self._say("the proxy ends again and again, and is given up", ended=former_end)
                return status
            lives += 1

    def _start(self, former_lives: int, former_end: str) -> None:
        self._pair.close()
        self._pair, theirs = socket.socketpair()
        self._pair.setblocking(False)
        self._serves = self._is_late = False
        told = json.dumps({"former_lives": former_lives, "former_end": former_end})
        socket.send_fds(self._pair, [told.encode()], self._listening)
        with theirs:
            theirs.set_inheritable(True)
            self._pid = os.posix_spawn(
                sys.executable,
                [
                    *(sys.executable, "-P", "-m", "tidemill", "proxy"),
                    *(*self._arguments, f"--keeper-fd={theirs.fileno()}"),
                ],
                os.environ,
                setpgroup=0,  # A ^C of the terminal is handed on, and should not come twice.
                setsigmask=(),
            )

    def _ended(self, *, is_bounded: bool) -> int:
        """Wait for the end of this life; return how it ended."""
        began_s = time.monotonic()
        while True:
            if is_bounded:
                left_s = began_s + SERVES_WITHIN_S - time.monotonic()
                told = signal.sigtimedwait(_SIGNALS, max(left_s, 0))
                if told is None:
                    is_bounded = False
                    self._hear()
                    if not self._serves and not self._is_stopping:
                        self._end_late()
                    continue
                number = told.si_signo
            else:
                number = signal.sigwait(_SIGNALS)
            if number != signal.SIGCHLD:
                self._hand_on(number)
            elif (status := self._reaped()) is not None:
                return status

    def _hand_on(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._has_terminal and not os.isatty(_STDIN):
                self._stop()
                return
            self._hear()
            if not self._serves:
                return  # One that starts may not know the signal yet, and reads its files anyway.
            os.kill(self._pid, number)
        elif not self._is_stopping:
            self._stop()
        else:
            # Two for the proxy as well, which was asked without one: it ends at once.
            for each in (signal.SIGINT, signal.SIGTERM):
                os.kill(self._pid, each)

    def _stop(self) -> None:
        self._is_stopping = True
        with contextlib.suppress(OSError):  # It has ended already.
            self._pair.shutdown(socket.SHUT_RDWR)
        self._hear()
        self._forget()  # When the proxy closes its own, newcomers are to be refused.

    def _end_late(self) -> None:
        self._is_late = True
        self._forget()
        os.kill(self._pid, signal.SIGKILL)

    def _hear(self) -> None:
        """Take what the proxy has given by now, in place of what was kept for it."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            line, listening, _, _ = socket.recv_fds(self._pair, _LINE_BYTES_MAX, SOCKETS_MAX)
            if line:
                self._forget()
                self._serves, self._listening = True, listening
                self._logs_text = line == _SERVES_TEXT

    def _forget(self) -> None:
        for descriptor in self._listening:
            os.close(descriptor)
        self._listening = ()

    def _reaped(self) -> int | None:
        """Reap all that have ended; return how the proxy did, if it is among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    status = os.waitstatus_to_exitcode(ended[1])
        return status

    def _say(self, event: str, **fields: str) -> None:
        """Write a line as the proxy writes its log: what logs for it is no part of this process."""
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        told = {"event": event, "level": "error", "process": "keeper", "timestamp": at, **fields}
        line = json.dumps(told)
        if self._logs_text:
            line = ", ".join([event, *(f"{name}: {field}" for name, field in fields.items())])
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
