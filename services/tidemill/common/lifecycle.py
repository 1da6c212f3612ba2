"""The start, readiness and stop of every process.

The standalone supervisor starts a process with `--supervisor-fd N`. This is one end of a socket
pair with four uses:

    go         the supervisor writes one byte, before which the process only imports
    ready      the process writes one line of JSON when it serves: `announce_ready`
    orphaned   end of file means that the supervisor has ended: the stop event is set
    failed     a process that ends before its line has failed to start; its reason is on stderr

Without a supervisor the process announces nothing; `/readyz` reports its readiness.

    with stop_on_signal(supervisor_fd=settings.supervisor_fd) as stop:
        async with proxy_server(settings) as server:
            announce_ready(settings.supervisor_fd, grpc=server.address, metrics=metrics.url)
            await stop.wait()
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import structlog

from tidemill.common.addresses import HostPort, bind, without_brackets

# A collection of the youngest generation visits this many objects, and every second one twice as
# many, at 0.1 to 0.45 us each. The default visits eleven times as many and blocks the loop for 20
# ms.
_OBJECTS_PER_COLLECTION = 3_000
_YOUNG_BEFORE_MIDDLE = 0
# A full collection takes longest and finds few cycles. It runs after some million new objects.
_MIDDLE_BEFORE_ALL = 1_000
_STDIN = 0  # file descriptor
_SECOND_SIGNAL_STATUS = 130  # exit status, as a shell reports an interrupted command


class StartError(Exception):
    """The process cannot start; the message says why and what to do."""


def bound_sockets(
    host: str, port: int, *, settings: tuple[str, str], reuse_port: bool = False
) -> list[socket.socket]:
    """Return a bound socket for each address of `host`; see `addresses.bind`.

    Raises StartError, which names the setting to change: one of `settings`, for host and port.
    """
    host_setting, port_setting = settings
    try:
        return bind(host, port, reuse_port=reuse_port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            reason = f"{host} is not an address of this machine; change {host_setting}"
        elif error.errno == errno.EADDRINUSE:
            reason = f"the port is in use; stop the process that uses it, or change {port_setting}"
        else:
            reason = f"{error.strerror or error}; change {host_setting} or {port_setting}"
        address = HostPort(without_brackets(host), port)
        raise StartError(f"cannot listen on {address}: {reason}") from error


def run(serve: Callable[[], Coroutine[None, None, None]]) -> int:
    """Run a process on uvloop to its end; log a failure and return the exit status."""
    import uvloop  # Imported here: only processes that serve need it.

    async def serve_guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(_log_callback)
        await serve()

    raise_file_limit()
    try:
        uvloop.run(serve_guarded())
    except BaseExceptionGroup as group:
        for error in leaf_errors(group):
            _log_failure(error)
        return 1
    except Exception as error:  # noqa: BLE001  # The one place where a process ends.
        _log_failure(error)
        return 1
    return 0


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum, because each connection is a file.

    Shells set a lower limit for programs that use `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # Some systems allow less than they report.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log_callback(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the exception of a callback. Its connection ends; the process continues."""
    structlog.get_logger().error(
        "callback failed", reason=context["message"], exc_info=context.get("exception")
    )


def leaf_errors(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of its nested groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaf_errors(error)
        else:
            yield error


def _log_failure(error: BaseException) -> None:
    log = structlog.get_logger()
    if isinstance(error, StartError):
        log.error("process refused to start", reason=str(error))
    else:
        log.error("process failed", error=type(error).__name__, reason=str(error), exc_info=error)


@contextlib.contextmanager
def stop_on_signal(
    *,
    supervisor_fd: int | None = None,
    before_exit: Callable[[], None] = lambda: None,
    on_hangup: Callable[[], None] = lambda: None,
) -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a second signal exits at once.

    The loss of the supervisor also sets the event. It does not count as a signal, because a signal
    follows it (`die_with_parent`). The loss of the terminal arrives as SIGHUP and counts as one.
    Any other SIGHUP calls `on_hangup`, which reads renewed files again. Needs a running event loop.
    """
    has_terminal = os.isatty(_STDIN)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    had_signal = False

    def on_signal() -> None:
        nonlocal had_signal
        if had_signal:
            # The operator wants to stop now. Recovery handles an exit at any instant.
            before_exit()
            os._exit(_SECOND_SIGNAL_STATUS)
        had_signal = True
        stop.set()

    def on_sighup() -> None:
        if has_terminal and not os.isatty(_STDIN):
            on_signal()  # A closed terminal is not a terminal any more.
        else:
            structlog.get_logger().info("reload requested")
            on_hangup()

    def on_supervisor() -> None:
        # The supervisor writes no more. A readable socket means that it has ended.
        assert supervisor_fd is not None
        loop.remove_reader(supervisor_fd)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_sighup)
    if supervisor_fd is not None:
        loop.add_reader(supervisor_fd, on_supervisor)
    try:
        yield stop
    finally:
        if supervisor_fd is not None:
            loop.remove_reader(supervisor_fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def announce_ready(supervisor_fd: int | None, **addresses: str) -> None:
    """Report to the supervisor, if there is one, that this process serves at `addresses`.

    Names in use: `grpc` ("127.0.0.1:8081"), `metrics` ("http://127.0.0.1:5557/metrics"), `admin`
    ("http://127.0.0.1:8080").
    """
    if supervisor_fd is None:
        return
    line = json.dumps({"event": "ready", "pid": os.getpid(), **addresses}) + "\n"
    # The socket buffer is larger than any line. The loss of the supervisor is detected elsewhere.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        os.write(supervisor_fd, line.encode())


def tune_garbage_collector() -> None:
    """Exempt all objects of the start from garbage collection, and collect less often.

    These objects live as long as the process. Reference counting frees the objects of a call. A
    search for cycles after every 700 new objects costs a busy server 5 % of its time.
    """
    if gc.get_freeze_count():  # The process was tuned before, and has ended a part of itself.
        gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, _YOUNG_BEFORE_MIDDLE, _MIDDLE_BEFORE_ALL)
