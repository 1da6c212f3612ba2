"""Failures of a running process's system calls, as with a failing disk.

The test traces the process (ptrace) until it makes the call. The test skips this call and sets an
error as its result. Then it detaches. The next call succeeds, as with a disk that has dropped the
unwritten bytes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
from typing import Final

# Numbers of the calls and offsets of their registers on x86-64.
WRITE: Final = frozenset({296, 328})  # pwritev, pwritev2
SYNC: Final = frozenset({75})  # fdatasync
RAX: Final = 10 * 8
ORIG_RAX: Final = 15 * 8

POKEUSER, DETACH, SYSCALL, SEIZE, INTERRUPT, LISTEN = 6, 17, 24, 0x4206, 0x4207, 0x4208
GET_SYSCALL_INFO = 0x420E
TRACESYSGOOD = 1  # option: marks stops at calls, to distinguish them from signals
CALL_STOP = signal.SIGTRAP | 0x80
EVENT_STOP = 128
ENTRY, EXIT = 1, 2
_INFO = struct.Struct("<B3xIQQQ64x")  # kind, architecture, pointers, number or result
WALL = 0x40000000  # waitpid option: wait for all traced processes
STOPPING = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})


def is_possible() -> bool:
    """Return whether this machine is supported and lets a process trace its children."""
    if platform.machine() != "x86_64":
        return False
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        try:
            _trace(SEIZE, child.pid)
        except PermissionError:
            return False
        finally:
            child.kill()
    return True


def fail_once(pid: int, calls: frozenset[int], error: int) -> None:
    """Fail the next of these calls of a process with `error`. Block until it has failed.

    Raises ProcessLookupError if the process ends before.
    """
    _trace(SEIZE, pid, 0, TRACESYSGOOD)
    _trace(INTERRUPT, pid)
    is_failing = False
    while True:
        _, status = os.waitpid(pid, WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"process {pid} has ended before it made the call")
        passed = 0  # a signal to pass to the process
        request = SYSCALL
        stopped_by = os.WSTOPSIG(status)
        if stopped_by == CALL_STOP:
            kind, number = _call_of(pid)
            if kind == ENTRY and number in calls:
                _poke(pid, ORIG_RAX, -1)
                is_failing = True
            elif kind == EXIT and is_failing:
                _poke(pid, RAX, -error)
                _trace(DETACH, pid)
                return
        elif status >> 16 == EVENT_STOP:
            request = LISTEN if stopped_by in STOPPING else SYSCALL
        else:
            passed = stopped_by
        _trace(request, pid, 0, passed)


def _call_of(pid: int) -> tuple[int, int]:
    """Return whether a call of a process begins or ends, and its number if it begins."""
    info = ctypes.create_string_buffer(_INFO.size)
    _trace(GET_SYSCALL_INFO, pid, _INFO.size, ctypes.addressof(info))
    kind, _, _, _, number = _INFO.unpack(info.raw)
    return kind, number


def _poke(pid: int, register: int, value: int) -> None:
    _trace(POKEUSER, pid, register, value)


def _trace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    """Call ptrace. Raises OSError."""
    if _PTRACE(request, pid, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


_PTRACE = ctypes.CDLL(None, use_errno=True).ptrace
_PTRACE.restype = ctypes.c_long
_PTRACE.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long]
