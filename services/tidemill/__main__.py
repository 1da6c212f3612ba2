"""The program: `tidemill COMMAND`, or `python -m tidemill COMMAND`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys

from tidemill.cli.processes import PROCESSES
from tidemill.common.parent import die_with_parent
from tidemill.proxy.keeper import has_keeper, is_kept, keep

_STDIN = 0  # the descriptor
_INIT_PID = 1  # of the first process of a container
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # exit status, as a shell shows it


def main() -> None:
    """Run a process, or a command against a running one."""
    open_missing_streams()
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "proxy" and has_keeper(arguments):
        # However stuck it is: who kills the first process of a proxy wants its port to be free.
        die_with_parent(signal.SIGKILL)
    if os.getpid() == _INIT_PID:
        live_as_init(has_children=command == "standalone")
    if command in PROCESSES:
        outlive_hangups()
        # A signal that ends the process without an exception (SIGBUS: the disk cannot read a page
        # that is mapped) leaves on stderr where it was.
        faulthandler.enable()
        if command == "proxy" and not is_kept(arguments):
            sys.exit(keep(arguments))
        # Before anything imports structlog: see there.
        importlib.import_module("tidemill.common.log")
        # Not through the command line's library: the time until a process serves is promised.
        sys.exit(PROCESSES[command](arguments))
    from tidemill.cli.app import run

    run(sys.argv[1:])


def live_as_init(*, has_children: bool) -> None:
    """Do what the first process of a container has to (ADR 0035).

    The kernel gives it SIGTERM only where it has a handler, and nobody else reaps processes that
    are left behind. SIGCHLD that is ignored lets the kernel do that, but who waits for children of
    its own, which is the standalone, would not hear how they ended; it reaps what it has started.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_ENDED_BY_SIGTERM))
    if not has_children:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def outlive_hangups() -> None:
    """Ignore SIGHUP, unless the terminal is gone, until `stop_on_signal` has a use for it.

    Files that were renewed while the process starts are read anyway.
    """
    has_terminal = os.isatty(_STDIN)

    def on_hangup(number: int, _frame: object) -> None:
        if has_terminal and not os.isatty(_STDIN):
            # As the signal ends whoever has no handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, on_hangup)


def open_missing_streams() -> None:
    """Put /dev/null where the starter closed a standard stream.

    Otherwise a file of the store would get its number, and the log be written into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The least free number, which is `fd`.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # As long as the process.
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # As long as the process.


if __name__ == "__main__":
    main()
