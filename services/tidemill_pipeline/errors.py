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

import re
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
    "Spark's Python process did not start within 10 s: the machine is overloaded. Start the job"
    " again: it continues where it stopped"
)


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
    if _NOT_STARTED in str(error):
        return TimeoutError.__name__, _START_AGAIN
    return None


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
