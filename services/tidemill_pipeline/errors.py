"""Errors of a pipeline. Each text says what to do.

PipelineError
├─ BadOption         an option or a setting is not valid; nothing was read
├─ DataLoss          messages or events of a read are lost
│  └─ QueueLoss        the queue no longer exists: topic deleted, or store created again
├─ ClusterRejection  the cluster rejected the call; a retry does not help
├─ NoAnswer          no proxy answered after all retries
└─ ArchiveError      the archive is damaged, does not match the broker, or cannot be written
   └─ AnotherWriter    another process committed first
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Final

# Errors of files and folders in traces of Python and Java: the last line, or a cause.
_OF_FILES: Final = (
    re.compile(
        r"(?:OSError|PermissionError|(?:FileNotFound|FileExists|NotADirectory|IsADirectory)Error):"
        r" (\[Errno \d+\] .+)"
    ),
    re.compile(
        r"java\.(?:io|nio\.file)\.\w+: (Mkdirs failed to create \S+|.*(?:No space left on device"
        r"|Permission denied|Read-only file system|File too large|Disk quota exceeded)\)?)"
    ),
    re.compile(r"java\.nio\.file\.(AccessDeniedException: .+)"),
)

# Spark gives the Python process of a stream 10 s to start. No setting changes this time.
_NOT_STARTED: Final = "Python worker failed to connect back"
_START_AGAIN: Final = (
    "Spark's Python process did not start within 10 s: the machine is overloaded. Give the job more"
    " processor time and start it again: it continues where it stopped"
)

_SHOWN_MAX: Final = 5  # names in a sentence


class PipelineError(Exception):
    """An error that ends a pipeline."""


def error_summary(error: BaseException) -> tuple[str, str] | None:
    """Return class name and text of the pipeline error in an exception; None: no such error.

    Spark wraps the errors of tasks and sources into its own error, with the trace as text. File
    errors of Python and Java are returned as OSError, a late Python process as TimeoutError.
    """
    if isinstance(error, PipelineError):
        return type(error).__name__, str(error)
    lines = str(error).splitlines()
    for line in reversed(lines):
        name, colon, text = line.strip().partition(": ")
        if colon and name.startswith(f"{__name__}."):
            return name.rpartition(".")[2], text
    for line in reversed(lines):
        for pattern in _OF_FILES:
            if match := pattern.search(line):
                return OSError.__name__, match[1]
    if is_late_start(error):
        return TimeoutError.__name__, _START_AGAIN
    return None


def is_late_start(error: BaseException) -> bool:
    """Return whether a stream ended because Spark's Python process did not start in time."""
    return _NOT_STARTED in str(error)


def listed(names: Iterable[str]) -> str:
    """Return sorted names for a sentence; of many names the first ones."""
    every = sorted(names)
    shown, more = ", ".join(every[:_SHOWN_MAX]), len(every) - _SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def suggestion(name: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown name as the end of a sentence; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


class BadOption(PipelineError):
    """An option is unknown, missing or has a value that is not valid."""


class DataLoss(PipelineError):
    """Messages or events of a read no longer exist."""


class QueueLoss(DataLoss):
    """A queue no longer exists. Another queue may have its name."""


class ClusterRejection(PipelineError):
    """The cluster rejected a call."""


class NoAnswer(PipelineError):
    """No proxy answered."""


class ArchiveError(PipelineError):
    """An archive does not match its manifest or its broker, or cannot be written."""


class AnotherWriter(ArchiveError):
    """Another archiver committed to the same archive."""


class Termination(KeyboardInterrupt):
    """SIGTERM ended a job. Like Ctrl-C, this is not an error of the pipeline."""
