"""Missing topics at the start of a read.

A missing topic that a user named is an error, since the name may be misspelt. A pattern without a
match and an internal topic (%DLQ%g) may get messages later: a batch only logs a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tidemill_pipeline.archive.manifest import Archive
from tidemill_pipeline.errors import BadOption, suggestion
from tidemill_pipeline.options import SourceOptions
from tidemill_pipeline.pulling import log

OWN = "%"  # first character of internal topics


def check_topics(
    options: SourceOptions,
    known: Collection[str],
    *,
    everything: Callable[[], Collection[str]],
    waits: bool,
) -> None:
    """Raise BadOption for missing topics that the options name.

    `known`: the requested topics that exist; `everything`: all topics. A read that `waits`, such as
    a stream, logs no warning.
    """
    topics = options.topics
    missing = sorted(set(topics.names).difference(known))
    misspelt = [name for name in missing if not name.startswith(OWN)]
    if misspelt:
        raise BadOption(_error_text(misspelt, everything(), options))
    if waits:
        return
    if topics.pattern and not known:
        log.warning("no topic%s matches %s: the read is empty", _where(options), topics.pattern)
    for name in missing:
        log.warning("there is no topic %s%s yet: it is not read", name, _where(options))


def check_archived(archive: Archive, options: SourceOptions) -> None:
    """Raise BadOption for a requested topic that the archive does not have."""
    namespace = options.connection.namespace
    known = {key.topic for key in archive.queues if key.namespace == namespace}
    missing = sorted(set(options.topics.names) - known)
    if missing:
        near = suggestion(missing[0], known)
        raise BadOption(f"the archive has no topic {', '.join(missing)}{near}")


def _error_text(missing: list[str], everything: Collection[str], options: SourceOptions) -> str:
    where = _where(options)
    return f"there is no topic {', '.join(missing)}{where}{suggestion(missing[0], everything)}"


def _where(options: SourceOptions) -> str:
    namespace = options.connection.namespace
    return (f" of the namespace {namespace}" if namespace else "") + (
        f" in the archive at {options.archive_path}" if options.read_mode == "archive" else ""
    )
