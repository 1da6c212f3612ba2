"""The program: `tidemill COMMAND`, or `python -m tidemill COMMAND`."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tidemill.cli.processes import PROCESSES
from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.common.parent import die_with_parent
from tidemill.proxy.keeper import has_keeper, is_kept, keep

_STDIN = 0  # the descriptor
_INIT_PID = 1  # of the first process of a container
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # exit status, as a shell shows it
# Processes that call `tune_garbage_collector` when they serve, except supervisors. Until then they
# create objects that stay, and searching these for cycles takes an eighth of the start. The imports
# of a broker create less than 150,000, so no collection runs before the store is opened.
_TUNED = ("broker", "proxy", "controller")
_OBJECTS_PER_COLLECTION = 200_000
# Packages that only an extra of the distribution installs.
_EXTRAS = {
    "cryptography": "release",
    "fastapi": "admin",
    "fastapi_offline": "admin",
    "h11": "admin",
    "httpx": "cli",
    "starlette": "admin",
    "uvicorn": "admin",
}


def main() -> None:
    """Run a process, or a command against a running one."""
    open_missing_streams()
    try:
        _run_command()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        reason = f"the package {error.name} is missing; run: pip install 'tidemill[{extra}]'"
        print(f"error: {reason}", file=sys.stderr)  # noqa: T201  # as the command line does
        sys.exit(EXIT_USAGE)


def _run_command() -> None:
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "proxy" and has_keeper(arguments):
        # SIGKILL, because the port must become free when the keeper dies, even if the proxy hangs.
        die_with_parent(signal.SIGKILL)
    if os.getpid() == _INIT_PID:
        live_as_init(has_children=command == "standalone")
    if command in PROCESSES:
        outlive_hangups()
        # A signal that ends the process without an exception prints its place on stderr, such as
        # SIGBUS for an unreadable page of a mapping.
        faulthandler.enable()
        if command == "proxy" and not is_kept(arguments):
            sys.exit(keep(arguments))
        shorten_start(command)
        # First, because tidemill.common.log must be imported before structlog.
        importlib.import_module("tidemill.common.log")
        # Without typer, because the start time of a process is promised.
        status = PROCESSES[command](arguments)
        if command in _TUNED:
            end_at_once(status)
        sys.exit(status)
    from tidemill.cli.app import run

    run(sys.argv[1:])


def run_to_end(arguments: Sequence[str]) -> NoReturn:
    """Run `tidemill` with other arguments in this process, and end it."""
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        end_at_once(end.code if isinstance(end.code, int) else EXIT_USAGE)
    end_at_once(0)


def live_as_init(*, has_children: bool) -> None:
    """Handle signals and orphans as the first process of a container (ADR 0035).

    The kernel delivers SIGTERM to process 1 only if it has a handler. Process 1 must also reap
    orphans: with SIGCHLD ignored, the kernel reaps them. The standalone does not ignore SIGCHLD,
    because it waits for its own children and reaps them.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_ENDED_BY_SIGTERM))
    if not has_children:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def shorten_start(command: str) -> None:
    """Save CPU time of the start of a process.

    On a busy machine, a start takes many times its CPU time, and a broker group waits for it.
    """
    # Pydantic would read the metadata of all installed packages to find plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # The library of numpy would start a thread per core, which spin until they get work. No process
    # multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if command in _TUNED:
        gc.set_threshold(_OBJECTS_PER_COLLECTION)


def end_at_once(status: int) -> NoReturn:
    """Call the exit handlers and end the process, without destroying its objects one by one.

    That takes longer than the drain of a broker, and the next process of the store waits for it.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  # There is no public name; multiprocessing uses it, too.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # It is full, or closed.
            stream.flush()
    os._exit(status)


def outlive_hangups() -> None:
    """Ignore SIGHUP until `stop_on_signal` handles it, unless the terminal was closed.

    A process that starts reads renewed files anyway.
    """
    has_terminal = os.isatty(_STDIN)

    def on_hangup(number: int, _frame: object) -> None:
        if has_terminal and not os.isatty(_STDIN):
            # The default action of the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, on_hangup)


def open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    Otherwise a file of the store would get the descriptor, and log lines would go into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest free descriptor, which is `fd`
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # open until the process ends


if __name__ == "__main__":
    main()
