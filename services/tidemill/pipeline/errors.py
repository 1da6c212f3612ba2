"""What goes wrong in a pipeline, each with a sentence that says what to do.

PipelineError
├─ BadOption        an option or a setting cannot be used; nothing was read
├─ DataLoss         what was to be read is gone
│  └─ Gone            the queue itself is: its topic was deleted, or its store made anew
├─ Refused          the cluster will not do it, however often it is asked
├─ Unreachable      nobody answered, as often as was allowed
└─ ArchiveError     the archive contradicts itself, or what it should be of
   └─ AnotherWriter   somebody else committed first
"""

from __future__ import annotations


class PipelineError(Exception):
    """A pipeline cannot go on."""


def told_by(error: BaseException) -> tuple[str, str] | None:
    """Return which of these errors another one is or has inside, and its sentence.

    Spark wraps what a task or a source has raised into an error of its own, with the trace as text.
    """
    if isinstance(error, PipelineError):
        return type(error).__name__, str(error)
    for line in reversed(str(error).splitlines()):
        name, found, sentence = line.strip().partition(": ")
        if found and name.startswith(f"{__name__}."):
            return name.rpartition(".")[2], sentence
    return None


class BadOption(PipelineError):
    """An option is unknown, missing, or has a value that it cannot have."""


class DataLoss(PipelineError):
    """Messages or events that were to be read are not there any more."""


class Gone(DataLoss):
    """A queue is not there any more, whatever has its name now."""


class Refused(PipelineError):
    """The cluster answered that it will not."""


class Unreachable(PipelineError):
    """No proxy answered."""


class ArchiveError(PipelineError):
    """An archive is not what its manifest says."""


class AnotherWriter(ArchiveError):
    """Another archiver committed to the same archive."""
