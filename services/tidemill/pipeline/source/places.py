"""Where queues begin and end for a read, from brokers, from an archive, or from both.

`auto` reads what is archived from the archive and the rest from brokers: the switch is where the
archive of a queue ends, so no offset is read twice and none passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

from tidemill.pipeline.archive.manifest import Archive, QueueKey
from tidemill.pipeline.archive.reading import first_offset_at
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.client import Client, Cluster, connect, matches
from tidemill.pipeline.errors import BadOption, Unreachable
from tidemill.pipeline.offsets import QueueEnds, QueueName
from tidemill.pipeline.options import EARLIEST, LATEST, Place, SourceOptions, Topics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What there is to read at one moment."""

    queues: Mapping[QueueName, QueueEnds]
    unreachable: frozenset[str] = frozenset()  # broker groups
    # Of queues that are archived in part: under which key, and what is before `archived_to`.
    keys: Mapping[QueueName, QueueKey] = field(default_factory=dict)
    archived_to: Mapping[QueueName, int] = field(default_factory=dict)

    @property
    def ends(self) -> dict[QueueName, int]:
        """Return where the queues end."""
        return {name: queue.max_offset for name, queue in self.queues.items()}

    @property
    def starts(self) -> dict[QueueName, int]:
        """Return where the queues begin."""
        return {name: queue.min_offset for name, queue in self.queues.items()}


class Places:
    """Looks at brokers and archive, as the options say."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    @cached_property
    def _store(self) -> ArchiveStore:
        return ArchiveStore(self._options.archive_path)

    @property
    def client(self) -> Client:
        """Return this process's client."""
        return connect(self._options.connection)

    def view(self) -> View:
        """Look at everything once, with one call to the cluster."""
        mode = self._options.read_mode
        if mode == "archive":
            return self._archived(self._store.archive())
        cluster = self.client.cluster(self._options.topics)
        view = View(queues=cluster.queues, unreachable=frozenset(cluster.unreachable))
        if mode == "auto" and self._options.archive_path:
            return self._both(view, self._store.archive())
        return view

    def resolve(self, place: Place, view: View, *, word: int) -> dict[QueueName, int]:
        """Return the offset of a place in every queue; `word` is for queues that it leaves out."""
        if place.at_ms is not None:
            return {name: self._at(name, view, place.at_ms) for name in view.queues}
        if place.group:
            progress = self._progress(place.group, view)
            return {name: _clamp(progress.get(name, EARLIEST), queue)
                    for name, queue in view.queues.items()}  # fmt: skip
        named = place.by_queue or {}
        _check_known(named, view)
        everywhere = word if place.everywhere is None else place.everywhere
        return {
            name: _of_word(
                named.get(name.topic, {}).get(name.broker, {}).get(name.queue_id, everywhere), queue
            )
            for name, queue in view.queues.items()
        }

    def check_young(self, starts: Mapping[QueueName, int], view: View) -> None:
        """Raise BadOption where an instant has no message in a queue, and that is an error."""
        if self._options.start.at_ms is None or self._options.start_strategy == "latest":
            return
        without = [name for name, at in starts.items() if at >= view.queues[name].max_offset]
        if len(without) == len(starts) and starts:
            raise BadOption(
                "startingTimestamp: no queue has a message that was stored then or later; with"
                " startingTimestampStrategy=latest the read starts at the end"
            )

    def _at(self, name: QueueName, view: View, at_ms: int) -> int:
        key = view.keys.get(name)
        if key is not None:
            found = first_offset_at(self._store, self._store.archive(), key, at_ms)
            if found < view.archived_to[name] or self._options.read_mode == "archive":
                return found
        queue = view.queues[name]
        if queue.max_offset == queue.min_offset:
            return queue.max_offset
        return min(queue.max_offset, max(queue.min_offset, self.client.offset_at(name, at_ms)))

    def _progress(self, group: str, view: View) -> dict[QueueName, int]:
        """Return how far a group is: by what it has acked, or pulled where it pulls."""
        found = {}
        for broker in {name.broker for name in view.queues}:
            for item in self.client.progress(broker, [group]):
                name = QueueName(item.topic, broker, item.queue_id)
                found[name] = max(item.commit_offset, item.pull_offset)
        return found

    # ------------------------------------------------------------ the archive

    def _archived(self, archive: Archive) -> View:
        queues, keys, to = {}, {}, {}
        for key, queue in archive.queues.items():
            if not _is_wanted(self._options.topics, key.topic):
                continue
            if key.namespace != self._options.connection.namespace:
                continue
            name = _name_of(key, archive)
            queues[name] = QueueEnds(
                name=name, topic_id=0, log_id=key.incarnation,
                min_offset=queue.start, max_offset=queue.end,
            )  # fmt: skip
            keys[name], to[name] = key, queue.end
        return View(queues=queues, keys=keys, archived_to=to)

    def _both(self, view: View, archive: Archive) -> View:
        queues = dict(view.queues)
        keys: dict[QueueName, QueueKey] = {}
        to: dict[QueueName, int] = {}
        for name, ends in view.queues.items():
            key = QueueKey(
                self._options.connection.namespace, name.topic, name.broker, name.queue_id,
                ends.incarnation,
            )  # fmt: skip
            archived = archive.queues.get(key)
            if archived is None:
                continue
            keys[name], to[name] = key, archived.end
            queues[name] = replace(
                ends,
                min_offset=min(ends.min_offset, archived.start),
                max_offset=max(ends.max_offset, archived.end),
            )
        return replace(view, queues=queues, keys=keys, archived_to=to)


def _name_of(key: QueueKey, archive: Archive) -> QueueName:
    """Return a name for an archived queue that no other one has.

    Of several topics of one name, one after the other, those before the last are told apart by
    their incarnation; all but one of them are history.
    """
    alike = [other for other in archive.queues if other[:4] == key[:4]]
    if alike[-1] == key:
        return QueueName(key.topic, key.broker, key.queue_id)
    return QueueName(key.topic, f"{key.broker}#{key.incarnation}", key.queue_id)


def _is_wanted(topics: Topics, topic: str) -> bool:
    return topic in topics.names or matches(topics.pattern, topic)


def _check_known(named: Mapping[str, Mapping[str, Mapping[int, int]]], view: View) -> None:
    """Raise BadOption where an offset is given for a queue that is not read."""
    for topic, brokers in named.items():
        for broker, queues in brokers.items():
            for queue_id in queues:
                name = QueueName(topic, broker, queue_id)
                if name not in view.queues and broker not in view.unreachable:
                    raise BadOption(f"offsets are given for {name}, which is not there")


def _of_word(offset: int, queue: QueueEnds) -> int:
    if offset == EARLIEST:
        return queue.min_offset
    return queue.max_offset if offset == LATEST else offset


def _clamp(offset: int, queue: QueueEnds) -> int:
    return min(max(offset, queue.min_offset), queue.max_offset)


def all_reachable(cluster: Cluster | View, connection: Iterable[str]) -> None:
    """Raise Unreachable where a broker group gave no answer."""
    missing = sorted(cluster.unreachable)
    if missing:
        raise Unreachable(
            f"no answer from {', '.join(missing)}, asked through {', '.join(connection)}; what is"
            " there cannot be known without it"
        )
