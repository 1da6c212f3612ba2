"""The topics of a write: a missing one is an error, since its name may be misspelt.

Many clusters create a topic at its first use. A misspelt name would then create a topic that nobody
reads. The option `createTopics` allows this.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

from tidemill_pipeline.client import NAMES_MAX, ClusterClient, ordinary_topics
from tidemill_pipeline.errors import BadOption, ClusterRejection, suggestion
from tidemill_pipeline.options import SinkOptions, TopicSelection
from tidemill_pipeline.pulling import log
from tidemill_pipeline.sink.messages import BadRow

_REMEDY: Final = "Create it with `tidemill topic create`, or set createTopics=true"


@final
class TargetTopics:
    """The existing topics among those of the rows of a task. Asks for each topic once."""

    def __init__(self, client: ClusterClient, options: SinkOptions) -> None:
        self._client, self._options = client, options
        self._errors: dict[str, str] = {}  # by topic; empty for an existing topic

    def look_up(self, names: Collection[str]) -> None:
        """Ask the cluster for new names. Raises NoAnswer."""
        new = sorted(set(names).difference(self._errors))
        for part in (new[at : at + NAMES_MAX] for at in range(0, len(new), NAMES_MAX)):
            self._errors.update(dict.fromkeys(part, ""))
            self._errors.update(missing_topics(self._client, self._options, part))

    def check(self, name: str | None) -> None:
        """Raise BadRow for a missing topic."""
        if name and (error := self._errors[name]):
            raise BadRow(error)


def check_target(client: ClusterClient, options: SinkOptions) -> None:
    """Raise BadOption if the topic of the options is missing. Raises NoAnswer."""
    for error in missing_topics(client, options, [options.topic]).values():
        raise BadOption(error)


def missing_topics(
    client: ClusterClient, options: SinkOptions, names: Collection[str]
) -> dict[str, str]:
    """Return the errors of topics that do not exist. Raises NoAnswer.

    Without the permission to list topics, the sends decide.
    """
    if options.creates_topics:
        return {}
    selection = TopicSelection(names=tuple(sorted(names)))
    try:
        cluster = client.cluster(selection)
        if cluster.unreachable and set(names).difference(cluster.topics):
            cluster = client.whole_cluster(selection)
        missing = sorted(set(names).difference(cluster.topics))
        known = ordinary_topics(client) if missing else set()
    except ClusterRejection as error:
        if options.has_dedup_keys:
            # Without the check, repeated rows could be stored again.
            raise BadOption(
                f"mode=dedup checks that the topic has deduplication, and the cluster rejects the"
                f" check, which needs Get on Cluster:pipeline: {error}"
            ) from None
        log.warning("cannot check whether topic %s exists: %s", ", ".join(sorted(names)), error)
        return {}
    errors = {
        name: f"there is no topic {name}{suggestion(name, known) or '.'} {_REMEDY}"
        for name in missing
    }
    if options.has_dedup_keys:
        for name in cluster.topics - cluster.deduplicated_topics:
            errors[name] = (
                f"mode=dedup needs a topic that knows the dedup keys of the property, and {name}"
                f" does not: `tidemill topic set {name} --dedup-window 10m`"
            )
    return errors
