"""Children of a standalone, forked from its supervisor (ADR 0107).

A child shares the memory of the modules that the supervisor has imported before, and does not
import them again. The supervisor has one thread and no uvloop, so a fork leaves no lock behind. The
child keeps the frames and objects of the supervisor until it ends, and uses none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from tidemill.common.forked_process import ForkedProcess

# Runs `tidemill` with these arguments, and ends the process.
RunToEnd: TypeAlias = Callable[[Sequence[str]], NoReturn]

# Modules that at least two children import. No module of this list starts a thread.
SHARED: Final = (
    "tidemill.common.metrics",
    "tidemill.common.metrics_server",
    "tidemill.message.encoding",
    "tidemill.message.rules",
    "tidemill.security.table",
    "tidemill.stubs.apache.rocketmq.v2.service_pb2",
    "tidemill.stubs.tidemill.broker.v1.broker_pb2",
    "tidemill.transport.aio.channel",
    "tidemill.transport.aio.server",
    "uvloop",
)
# The module of a command that imports most of the others. A child imports it before it may serve.
_MODULES: Final = {
    "broker": "tidemill.broker.app",
    "proxy": "tidemill.proxy.app",
    "admin": "tidemill.admin.process",
    "controller": "tidemill.controller.app",
}
_PR_SET_NAME: Final = 15  # prctl option: the name of the process in `ps` and `top` (Linux)
_FAILED: Final = 1
_STDIN, _STDOUT, _STDERR = range(3)  # descriptors


def import_shared() -> None:
    """Import what children share, and keep the garbage collectors of children off its memory."""
    for name in SHARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def fork_child(
    name: str, command: Sequence[str], descriptor: int, run_to_end: RunToEnd
) -> ForkedProcess:
    """Start `tidemill COMMAND` in a fork; of the open files it gets `descriptor` alone.

    The fork imports the modules of the command at once. It waits for a byte from `descriptor`
    before it runs the command, and ends if the supervisor ends before.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if not pid:
        try:
            _leave_supervisor(name, descriptor)
            gc.disable()  # What an import creates stays.
            importlib.import_module(_MODULES[command[0]])
            gc.enable()
            if os.read(descriptor, 1):
                run_to_end(command)
        except BaseException:  # noqa: BLE001  # The frames of the supervisor must not handle it.
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(_FAILED)
    return ForkedProcess(pid)


def _leave_supervisor(name: str, descriptor: int) -> None:
    """Give up the signals, the process group and the open files of the supervisor."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ctrl-C is for the supervisor, which stops the others in order.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, _STDIN)
    os.dup2(_STDERR, _STDOUT)  # Standard output has only the ready line of the supervisor.
    # Objects of the supervisor still name these descriptors, so no new file may get their numbers.
    for inherited in [int(one.name) for one in Path("/dev/fd").iterdir()]:
        if inherited > _STDERR and inherited not in (descriptor, null):
            with contextlib.suppress(OSError):  # That of the listing is closed.
                os.fstat(inherited)
                os.dup2(null, inherited, inheritable=False)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15])
