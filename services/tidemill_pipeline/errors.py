"""What goes wrong in a pipeline, each with a sentence that says what to do.

PipelineError
├─ BadOption        an option or a setting cannot be used; nothing was read
├─ DataLoss         what was to be read is gone
│  └─ Gone            the queue itself is: its topic was deleted, or its store made anew
├─ Refused          the cluster will not do it, however often it is asked
├─ Unreachable      nobody answered, as often as was allowed
└─ ArchiveError     the archive contradicts itself, or what it should be of, or cannot be written
   └─ AnotherWriter   somebody else committed first
"""

from __future__ import annotations

import re
from typing import Final

# Of a file or a folder, as Python and Java tell it: the last line of a trace, or a cause in it.
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

# Spark gives the Python process of a stream 10 s to start, which no setting changes.
_NOT_STARTED: Final = "Python worker failed to connect back"
_START_AGAIN: Final = (
    "Spark gave up waiting for its Python process, which had not started after 10 s: the machine"
    " had too little to spare for it. Start it again: it goes on where it was"
)


class PipelineError(Exception):
    """A pipeline cannot go on."""


def error_summary(error: BaseException) -> tuple[str, str] | None:
    """Return which of these errors another one is or has inside, and its sentence.

    Spark wraps what a task or a source has raised into an error of its own, with the trace as text.
    What a file or a folder has refused is an OSError there, also where Java met it; a process that
    did not start in time a TimeoutError.
    """
    if isinstance(error, PipelineError):
        return type(error).__name__, str(error)
    lines = str(error).splitlines()
    for line in reversed(lines):
        name, found, sentence = line.strip().partition(": ")
        if found and name.startswith(f"{__name__}."):
            return name.rpartition(".")[2], sentence
    for line in reversed(lines):
        for pattern in _OF_FILES:
            if told := pattern.search(line):
                return OSError.__name__, told[1]
    if _NOT_STARTED in str(error):
        return TimeoutError.__name__, _START_AGAIN
    return None


class BadOption(PipelineError):
    """An option is unknown, missing, or has a value that it cannot have."""


class DataLoss(PipelineError):
    """Messages or events that were to be read are not there any more."""


class QueueLoss(DataLoss):
    """A queue is not there any more, whatever has its name now."""


class ClusterRejection(PipelineError):
    """The cluster answered that it will not."""


class NoAnswer(PipelineError):
    """No proxy answered."""


class ArchiveError(PipelineError):
    """An archive is not what its manifest says, or cannot be written."""


class AnotherWriter(ArchiveError):
    """Another archiver committed to the same archive."""


class Termination(KeyboardInterrupt):
    """SIGTERM has ended a job, as Ctrl-C does; no error of the pipeline."""
