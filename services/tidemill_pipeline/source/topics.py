"""Topics that a read asks for and that are not there, when it begins.

One that was named is an error, since nothing would ever come of a name that is misspelt. What a
pattern has no match for, and what a cluster makes when it is needed (%DLQ%g), may come: a batch,
which does not wait for it, says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

from tidemill_pipeline.archive.manifest import Archive
from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import SourceOptions, TopicSelection
from tidemill_pipeline.pulling import log

EVERY_TOPIC = ".*"  # but those of the cluster's own
OWN = "%"  # what names of topics begin with that a cluster makes by itself


def check_topics(
    options: SourceOptions,
    known: Collection[str],
    *,
    everything: Callable[[], Collection[str]],
    waits: bool,
) -> None:
    """Raise BadOption for topics that were asked for by name and are nowhere.

    `known`: those of the ones asked for that are there; `everything`: all that are. What `waits`,
    as a stream does, is told nothing of what may come.
    """
    topics = options.topics
    missing = sorted(set(topics.names).difference(known))
    misspelt = [name for name in missing if not name.startswith(OWN)]
    if misspelt:
        raise BadOption(_error_text(misspelt, everything(), options))
    if waits:
        return
    if topics.pattern and not known:
        log.warning("no topic%s matches %s: nothing is read", _where(options), topics.pattern)
    for name in missing:
        log.warning("there is no topic %s%s yet: nothing is read of it", name, _where(options))


def check_archived(archive: Archive, options: SourceOptions) -> None:
    """Raise BadOption for a topic asked for by name of which an archive has nothing."""
    namespace = options.connection.namespace
    known = {key.topic for key in archive.queues if key.namespace == namespace}
    missing = sorted(set(options.topics.names) - known)
    if missing:
        near = meant(missing[0], known)
        raise BadOption(f"the archive has no topic {', '.join(missing)}{near}")


def names_of(client: ClusterClient) -> set[str]:
    """Return the topics that there are."""
    return {queue.topic for queue in client.cluster(TopicSelection(pattern=EVERY_TOPIC)).queues}


def _error_text(missing: list[str], everything: Collection[str], options: SourceOptions) -> str:
    where = _where(options)
    return f"there is no topic {', '.join(missing)}{where}{meant(missing[0], everything)}"


def meant(name: str, everything: Collection[str]) -> str:
    """Return the end of a sentence on a name that is nowhere, where one is much like it."""
    near = difflib.get_close_matches(name, everything, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _where(options: SourceOptions) -> str:
    namespace = options.connection.namespace
    return (f" of the namespace {namespace}" if namespace else "") + (
        f" in the archive at {options.archive_path}" if options.read_mode == "archive" else ""
    )
