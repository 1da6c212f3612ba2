"""How a process of ours starts, says that it is ready, and stops.

Under the standalone supervisor a process is started with `--supervisor-fd N`, its end of a socket
pair that does three things:

    ready      the process writes one line of JSON when it serves: `announce_ready`
    orphaned   end of file means that the supervisor is gone: the stop event is set
    failed     a process that ends before its line has failed to start; its reason is on stderr

Without a supervisor nothing is announced: readiness is the `/readyz` endpoint's to tell.

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

# A collection of the youngest looks through that many objects, and every second one through twice
# as many, at 0.1 to 0.45 us each. With the usual eleven times as many everybody would wait for
# 20 ms.
_OBJECTS_A_COLLECTION = 3_000
_YOUNG_BEFORE_MIDDLE = 0
# All objects, which takes longest, only after some million new ones that stay: cycles are few.
_MIDDLE_BEFORE_ALL = 1_000
_STDIN = 0  # the descriptor
_SECOND_SIGNAL_STATUS = 130  # exit status, as a shell shows an interrupted command


class StartError(Exception):
    """The process cannot run here and now; the message says why and what to do."""


def cannot_listen(
    host: str, port: int, *, settings: tuple[str, str], error: OSError | None = None
) -> StartError:
    """Say why nobody can listen there, and which of the two `settings` (host, port) to change.

    Without an `error`, which gRPC does not tell, the address is tried again to learn it.
    """
    host_setting, port_setting = settings
    error = error or _bind_error(host, port)
    where = f"cannot listen on {host}:{port}: "
    if isinstance(error, socket.gaierror) or (error and error.errno == errno.EADDRNOTAVAIL):
        reason = f"{host} is no address of this machine; change {host_setting}"
    elif error and error.errno == errno.EADDRINUSE:
        reason = f"the port is in use; stop who uses it, or change {port_setting}"
    else:
        told = (error.strerror or str(error)) if error else "the address is refused"
        reason = f"{told}; change {host_setting} or {port_setting}"
    return StartError(where + reason)


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None


def run(serve: Callable[[], Coroutine[None, None, None]]) -> int:
    """Run a process on uvloop to its end; return its exit status, after logging what went wrong."""
    import uvloop  # Here: only processes that serve need it.

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(_log_callback)
        await serve()

    raise_file_limit()
    try:
        uvloop.run(guarded())
    except BaseExceptionGroup as group:
        for error in leaves(group):
            _log_end(error)
        return 1
    except Exception as error:  # noqa: BLE001  # The one place where a process ends.
        _log_end(error)
        return 1
    return 0


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one.

    The lower limit that shells set is for programs that pass descriptors to `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # Some systems allow less than they say.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log_callback(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a callback raised, such as that of a connection, which ends; the process goes on."""
    structlog.get_logger().error(
        "callback failed", reason=context["message"], exc_info=context.get("exception")
    )


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, without the groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def _log_end(error: BaseException) -> None:
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

    The loss of the supervisor sets it too, and is followed by a signal (`die_with_parent`), so it
    is none. The loss of the terminal, which comes as SIGHUP, is one. Otherwise SIGHUP calls
    `on_hangup`: files that were renewed are to be read again. Needs a running event loop.
    """
    has_terminal = os.isatty(_STDIN)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    had_signal = False

    def on_signal() -> None:
        nonlocal had_signal
        if had_signal:
            # The operator is in a hurry; recovery copes with any instant.
            before_exit()
            os._exit(_SECOND_SIGNAL_STATUS)
        had_signal = True
        stop.set()

    def on_sighup() -> None:
        if has_terminal and not os.isatty(_STDIN):
            on_signal()  # A terminal that is gone is one no more.
        else:
            structlog.get_logger().info("reload asked for")
            on_hangup()

    def on_supervisor() -> None:
        # The supervisor never writes, so a readable socket is its end.
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
    """Tell the supervisor, where there is one, that this process serves at `addresses`.

    Names in use: `grpc` ("127.0.0.1:8081"), `metrics` ("http://127.0.0.1:5557/metrics"), `admin`
    ("http://127.0.0.1:8080").
    """
    if supervisor_fd is None:
        return
    line = json.dumps({"event": "ready", "pid": os.getpid(), **addresses}) + "\n"
    # A line is far smaller than a socket's buffer; a supervisor that has gone is noticed elsewhere.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        os.write(supervisor_fd, line.encode())


def settle_memory() -> None:
    """Spare the garbage collector what start-up has made, and most of its rounds.

    What stays for good need not be looked at again. What a call makes is freed by counting
    references; looking for cycles after every 700 new objects costs a busy server 5 % of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION, _YOUNG_BEFORE_MIDDLE, _MIDDLE_BEFORE_ALL)
