"""Begin and end of queues for a read, from brokers, from an archive or from both.

`auto` reads archived messages from the archive and the others from brokers. It switches exactly at
the begin and the end of a queue's archive, so it reads each offset once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

from tidemill_pipeline.archive.manifest import Archive, ArchivedQueue, QueueKey
from tidemill_pipeline.archive.reading import first_offset_at
from tidemill_pipeline.archive.store import ArchiveStore, shared_store
from tidemill_pipeline.client import ClusterClient, connect, ordinary_topics
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.offsets import Offsets, QueueEnds, QueueName, SourceQueue
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, SourceOptions, TopicSelection
from tidemill_pipeline.pulling import SHORT_S, report_short_queue
from tidemill_pipeline.source.outages import repeat_until_settled
from tidemill_pipeline.source.topics import check_topics

# Approximate bytes of a message in a broker's log without its body: properties and origin.
BESIDE_BODY_BYTES: Final = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """Queues of brokers and archive at one moment."""

    # The current incarnation of a name comes last.
    queues: Mapping[SourceQueue, QueueEnds]
    # Reply of the brokers; None: only the archive was read.
    cluster: ClusterState | None = None
    archive: Archive = field(default_factory=Archive)
    archived_to: Mapping[SourceQueue, int] = field(default_factory=dict)  # end of the archive
    # Archived queues whose end the archive has recorded.
    ended: Collection[SourceQueue] = ()

    @property
    def unreachable(self) -> set[str]:
        """Return the broker groups that did not answer."""
        return set() if self.cluster is None else self.cluster.unreachable

    @property
    def ends(self) -> dict[SourceQueue, int]:
        """Return the end offsets of the queues."""
        return {queue: ends.max_offset for queue, ends in self.queues.items()}

    def is_at_broker(self, queue: SourceQueue) -> bool:
        """Return whether a broker has the queue. Without brokers: whether the archive has it."""
        if self.cluster is None:
            return queue in self.queues
        return queue in self.cluster.queues

    def has_lost(self, queue: SourceQueue) -> bool:
        """Return whether a requested queue no longer exists, neither at brokers nor archived."""
        if queue in self.queues:
            return False
        return self.cluster is None or self.cluster.has_lost(queue)

    def has_lost_tail(self, queue: SourceQueue, at: int) -> bool:
        """Return whether messages after the archived end were lost with their queue.

        If the archive has recorded the end of the queue, no message followed it.
        """
        if self.cluster is None or queue not in self.archived_to:
            return False
        end = self.archived_to[queue]
        is_after = at > end or (at == end and queue not in self.ended)
        return is_after and self.cluster.has_lost(queue)

    def short_queues(self, given: Offsets) -> set[SourceQueue]:
        """Return the queues that end at their broker before the read or archived offset."""
        if self.cluster is None:
            return set()
        reached = dict(self.archived_to)
        for queue, at in given.at.items():
            reached[queue] = max(at, reached.get(queue, 0))
        ends = self.cluster.queues
        removed = {
            queue
            for queue, at in given.at.items()
            if self.cluster.has_removed(queue.broker)
            and (queue not in self.archived_to or self.has_lost_tail(queue, at))
        }
        return removed | {
            queue
            for queue in ends.keys() & reached.keys()
            if reached[queue] > ends[queue].max_offset
        }


class OffsetResolver:
    """Resolver of offsets: it reads begin and end of queues as the options require."""

    def __init__(self, options: SourceOptions, *, short_s: float = SHORT_S) -> None:
        self._options = options
        self._short_s = short_s  # how long a queue may end before its known end

    @property
    def store(self) -> ArchiveStore:
        """Return the archive's store, which reads only new entries."""
        return shared_store(self._options.archive_path)

    @property
    def client(self) -> ClusterClient:
        """Return this process's client."""
        return connect(self._options.connection)

    @property
    def are_both(self) -> bool:
        """Return whether the read combines brokers and an archive."""
        return self._options.read_mode == "auto" and bool(self._options.archive_path)

    def view(
        self,
        given: Offsets,
        *,
        excused: Collection[SourceQueue] = (),
        planned: Collection[SourceQueue] = (),
    ) -> SourceView:
        """Return the current view. Some broker groups may be unreachable.

        `given`: the read or planned end of queues. While a queue ends before it, the call retries
        for a while, except for the `excused`. `planned`: queues to find in the archive even if the
        options no longer include their topics.
        """
        return self._view(ClusterClient.cluster, given, excused, planned)

    def whole_view(self, *, excused: Collection[SourceQueue] = ()) -> SourceView:
        """Return the current view of all broker groups. Raises NoAnswer."""
        return self._view(ClusterClient.whole_cluster, Offsets(at={}), excused)

    def _view(
        self,
        look: Callable[[ClusterClient, TopicSelection], ClusterState],
        given: Offsets,
        excused: Collection[SourceQueue],
        planned: Collection[SourceQueue] = (),
    ) -> SourceView:
        if self._options.read_mode == "archive":
            return self._archived(self.store.existing(), planned)
        view = repeat_until_settled(
            self.client,
            lambda: self._look(look, planned),
            lambda view: view.short_queues(given).difference(excused),
            short_s=self._short_s,
        )
        assert view.cluster is not None, "the view includes brokers"
        for queue, archived_to in sorted(view.archived_to.items()):
            ends = view.cluster.queues.get(queue)
            if ends is not None and ends.max_offset < archived_to and queue not in excused:
                report_short_queue(
                    queue,
                    ends.max_offset,
                    f"is archived up to {archived_to}",
                    fails=self._options.fails_on_data_loss,
                    goes_on=f"the archive serves it up to {archived_to}",
                )
        return view

    def _look(
        self,
        look: Callable[[ClusterClient, TopicSelection], ClusterState],
        planned: Collection[SourceQueue],
    ) -> SourceView:
        options = self._options
        # Read the archive first: the brokers then have at least what is archived.
        archive = self.store.existing() if self.are_both else None
        cluster = look(self.client, options.topics)
        view = SourceView(queues=cluster.queues, cluster=cluster)
        return view if archive is None else self._both(view, archive, planned)

    def check_topics(self, view: SourceView, *, waits: bool) -> None:
        """Raise BadOption for requested topics that neither brokers nor the archive have."""
        namespace = self._options.connection.namespace
        archived = {key.topic for key in view.archive.queues if key.namespace == namespace}

        def everything() -> set[str]:
            if view.cluster is None:
                return archived
            return archived | ordinary_topics(self.client)

        known = {queue.topic for queue in view.queues}
        check_topics(self._options, known, everything=everything, waits=waits)

    def resolve(
        self, boundary: ReadBoundary, view: SourceView, *, word: int
    ) -> dict[SourceQueue, int]:
        """Return the offset of a boundary in every queue; `word` applies to omitted queues.

        Raises BadOption for an offset after the end of its queue.
        """
        if boundary.at_ms is not None:
            return {queue: self._at(queue, view, boundary.at_ms) for queue in view.queues}
        if boundary.group:
            progress = self._progress(boundary.group, view)
            # A group no longer reads queues that only the archive has.
            return {
                queue: _clamp(progress.get(queue.name, EARLIEST), ends)
                if view.is_at_broker(queue)
                else ends.max_offset
                for queue, ends in view.queues.items()
            }
        everywhere = word if boundary.everywhere is None else boundary.everywhere
        named = _named(boundary, view)
        for queue, offset in sorted(named.items()):
            end = view.queues[queue].max_offset
            if offset > end:
                raise BadOption(f"offset {offset} is given for {queue}, which ends at {end}")
        starts = {
            queue: _of_word(named.get(queue, everywhere), ends)
            for queue, ends in view.queues.items()
        }
        if boundary.by_queue is not None:
            # Named offsets do not include deleted incarnations, which only the archive has.
            archived = [each for each in view.queues if not view.is_at_broker(each)]
            starts |= {each: view.queues[each].max_offset for each in archived if each not in named}
        return starts

    def check_stops(self, view: SourceView) -> None:
        """Raise BadOption if the end of a stream names a queue that does not exist."""
        _named(self._options.end, view, by_name=view.is_at_broker)

    def stops(self, view: SourceView) -> Mapping[SourceQueue, int] | None:
        """Return the offsets before which a stream stops, by queue; None: it does not stop.

        A stream calls this repeatedly, also after a topic was deleted. The name of a deleted topic
        does not match its archived incarnations.
        """
        if self._options.end.by_queue is None:
            return None
        return {
            queue: view.queues[queue].max_offset if at == LATEST else at
            for _, queue, at in _matches(self._options.end, view, view.is_at_broker)
            if queue is not None
        }

    def check_start_has_messages(self, starts: Mapping[SourceQueue, int], view: SourceView) -> None:
        """Raise BadOption if no queue has a message since the starting timestamp."""
        if self._options.start.at_ms is None or self._options.start_strategy == "latest":
            return
        without = [queue for queue, at in starts.items() if at >= view.queues[queue].max_offset]
        if len(without) == len(starts) and starts:
            raise BadOption(
                "startingTimestamp: no queue has a message stored at this time or later; with"
                " startingTimestampStrategy=latest the read starts at the end"
            )

    def _at(self, queue: SourceQueue, view: SourceView, at_ms: int) -> int:
        if queue in view.archived_to:
            key = self._key_of(queue)
            archived = first_offset_at(self.store, view.archive, key, at_ms)
            # At the begin of the archive, the broker may have earlier messages of that time.
            is_first = archived <= view.archive.queues[key].start
            may_be_earlier = is_first and view.queues[queue].min_offset < archived
            if (
                self._options.read_mode == "archive"
                or not view.is_at_broker(queue)
                or (archived < view.archived_to[queue] and not may_be_earlier)
            ):
                return archived
        ends = view.queues[queue]
        if ends.max_offset == ends.min_offset:
            return ends.max_offset
        return min(ends.max_offset, max(ends.min_offset, self.client.offset_at(queue, at_ms)))

    def _progress(self, group: str, view: SourceView) -> dict[QueueName, int]:
        """Return the offset of a group in each queue: acked, or pulled if it pulls."""
        offsets = {}
        brokers = {queue.broker for queue in view.queues if view.is_at_broker(queue)}
        for broker in sorted(brokers):
            for item in self.client.progress(broker, [group]):
                if item.is_retry:
                    continue  # The queue belongs to the group's retry topic.
                name = QueueName(item.topic, broker, item.queue_id)
                offsets[name] = max(item.commit_offset, item.pull_offset)
        return offsets

    # ------------------------------------------------------------ the archive

    def _key_of(self, queue: SourceQueue) -> QueueKey:
        return QueueKey.of(self._options.connection.namespace, queue)

    def _archived(self, archive: Archive, planned: Collection[SourceQueue]) -> SourceView:
        queues = {
            key.queue: QueueEnds(
                queue=key.queue, min_offset=each.start, max_offset=each.end, bytes=_bytes(each)
            )
            for key, each in archive.queues.items()
            if key.namespace == self._options.connection.namespace
            and (self._options.topics.have(key.topic) or key.queue in planned)
        }
        ends = {queue: each.max_offset for queue, each in queues.items()}
        ended = {queue for queue in queues if archive.queues[self._key_of(queue)].has_ended}
        return SourceView(queues=queues, archive=archive, archived_to=ends, ended=ended)

    def _both(
        self, view: SourceView, archive: Archive, planned: Collection[SourceQueue]
    ) -> SourceView:
        """Return the union of brokers and archive.

        Queues that brokers no longer have or cannot report now have their archived offsets.
        """
        archived = self._archived(archive, planned)
        # Earlier incarnations come first, as in the archive.
        queues = {
            queue: ends for queue, ends in archived.queues.items() if queue not in view.queues
        }
        for queue, ends in view.queues.items():
            own = archived.queues.get(queue)
            queues[queue] = ends if own is None else _union(own, ends)
        return replace(archived, queues=queues, cluster=view.cluster)


def _bytes(archived: ArchivedQueue) -> int:
    """Return the approximate size of a queue's messages according to the manifest."""
    return sum(each.bytes + each.rows * BESIDE_BODY_BYTES for each in archived.ranges)


def _union(archived: QueueEnds, ends: QueueEnds) -> QueueEnds:
    """Return the ends of a queue in the union of archive and broker."""
    before = archived.min_offset - ends.min_offset
    behind = ends.max_offset - max(archived.max_offset, ends.min_offset)
    return replace(
        ends,
        min_offset=min(ends.min_offset, archived.min_offset),
        max_offset=max(ends.max_offset, archived.max_offset),
        bytes=archived.bytes + round((max(0, before) + max(0, behind)) * ends.bytes_per_row),
    )


def _anyone(_queue: SourceQueue) -> bool:
    return True


def _named(
    boundary: ReadBoundary, view: SourceView, *, by_name: Callable[[SourceQueue], bool] = _anyone
) -> dict[SourceQueue, int]:
    """Return the offsets that a user named, by queue. Raises BadOption for a missing queue."""
    offsets = {}
    for name, queue, offset in _matches(boundary, view, by_name):
        if queue is not None:
            offsets[queue] = offset
        elif name.broker not in view.unreachable:
            raise BadOption(f"offsets are given for {name}, which does not exist")
    return offsets


def _matches(
    boundary: ReadBoundary, view: SourceView, by_name: Callable[[SourceQueue], bool]
) -> Iterator[tuple[QueueName, SourceQueue | None, int]]:
    """Yield name, queue if it exists, and offset for each queue that a user named.

    A name means its last incarnation that `by_name` accepts. To name an earlier one, a user adds
    the incarnation to the broker group: `broker#LOG/7`.
    """
    last = {queue.name: queue for queue in view.queues if by_name(queue)}
    whole = {
        QueueName(queue.topic, f"{queue.broker}#{queue.incarnation}", queue.queue_id): queue
        for queue in view.queues
    }
    for topic, brokers in (boundary.by_queue or {}).items():
        for broker, queues in brokers.items():
            for queue_id, offset in queues.items():
                name = QueueName(topic, broker, queue_id)
                yield name, last.get(name) or whole.get(name), offset


def _of_word(offset: int, ends: QueueEnds) -> int:
    if offset == EARLIEST:
        return ends.min_offset
    return ends.max_offset if offset == LATEST else offset


def _clamp(offset: int, ends: QueueEnds) -> int:
    return min(max(offset, ends.min_offset), ends.max_offset)
