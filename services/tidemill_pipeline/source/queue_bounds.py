"""Where queues begin and end for a read, from brokers, from an archive, or from both.

`auto` reads what is archived from the archive and the rest from brokers: the switches are where the
archive of a queue begins and ends, so no offset is read twice and none passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

from tidemill_pipeline.archive.manifest import Archive, ArchivedQueue, QueueKey
from tidemill_pipeline.archive.reading import first_offset_at
from tidemill_pipeline.archive.store import ArchiveStore, shared_store
from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.offsets import Offsets, QueueEnds, QueueName, SourceQueue
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, SourceOptions, TopicSelection
from tidemill_pipeline.pulling import SHORT_S, report_short_queue
from tidemill_pipeline.source.outages import repeat_until_settled
from tidemill_pipeline.source.topics import check_topics, names_of

# Of a message, about what a broker's log has of it: properties, and where it came from.
BESIDE_BODY_BYTES: Final = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """What there is to read at one moment."""

    # Of queues of one name, one after the other, the last one comes last.
    queues: Mapping[SourceQueue, QueueEnds]
    # What brokers said; None where only an archive was looked at.
    cluster: ClusterState | None = None
    # Of queues that are archived in part: what is before `archived_to`.
    archive: Archive = field(default_factory=Archive)
    archived_to: Mapping[SourceQueue, int] = field(default_factory=dict)
    # Of those the ones of which the archive knows that nothing comes behind it.
    over: Collection[SourceQueue] = ()

    @property
    def unreachable(self) -> set[str]:
        """Return the broker groups that gave no answer."""
        return set() if self.cluster is None else self.cluster.unreachable

    @property
    def ends(self) -> dict[SourceQueue, int]:
        """Return where the queues end."""
        return {queue: ends.max_offset for queue, ends in self.queues.items()}

    def is_at_broker(self, queue: SourceQueue) -> bool:
        """Say whether a broker told of a queue; of an archive alone, that it is there."""
        if self.cluster is None:
            return queue in self.queues
        return queue in self.cluster.queues

    def has_lost(self, queue: SourceQueue) -> bool:
        """Say whether a queue that was asked for is not there any more, in no archive either."""
        if queue in self.queues:
            return False
        return self.cluster is None or self.cluster.has_lost(queue)

    def has_lost_tail(self, queue: SourceQueue, at: int) -> bool:
        """Say whether what stood at an offset went with a queue of which the archive has less.

        That nothing stood right behind its end the archive may have written down.
        """
        if self.cluster is None or queue not in self.archived_to:
            return False
        end = self.archived_to[queue]
        return (at > end or (at == end and queue not in self.over)) and self.cluster.has_lost(queue)

    def short_queues(self, given: Offsets) -> set[SourceQueue]:
        """Return the queues of which brokers tell less than was read up to, or archived."""
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
    """Looks at brokers and archive, as the options say."""

    def __init__(self, options: SourceOptions, *, short_s: float = SHORT_S) -> None:
        self._options = options
        self._short_s = short_s  # how long a queue may end too soon

    @property
    def store(self) -> ArchiveStore:
        """Return the archive, of which only what is new is read each time."""
        return shared_store(self._options.archive_path)

    @property
    def client(self) -> ClusterClient:
        """Return this process's client."""
        return connect(self._options.connection)

    @property
    def are_both(self) -> bool:
        """Say whether brokers and an archive are read as one."""
        return self._options.read_mode == "auto" and bool(self._options.archive_path)

    def view(
        self,
        given: Offsets,
        *,
        excused: Collection[SourceQueue] = (),
        planned: Collection[SourceQueue] = (),
    ) -> SourceView:
        """Look at everything with one call to the cluster; some of it may give no answer.

        `given`: where queues were read up to, or are planned to be. What ends before it is looked
        at again for a while, but for the `excused`. `planned`: queues to look for in the archive,
        also where the options do not ask for their topics any more.
        """
        return self._view(ClusterClient.cluster, given, excused, planned)

    def whole_view(self, *, excused: Collection[SourceQueue] = ()) -> SourceView:
        """Look at everything, all broker groups among it. Raises NoAnswer."""
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
        assert view.cluster is not None, "brokers were asked"
        for queue, archived_to in sorted(view.archived_to.items()):
            ends = view.cluster.queues.get(queue)
            if ends is not None and ends.max_offset < archived_to and queue not in excused:
                report_short_queue(
                    queue,
                    ends.max_offset,
                    f"is archived up to {archived_to}",
                    fails=self._options.fails_on_data_loss,
                    goes_on=f"it is read from the archive up to {archived_to}",
                )
        return view

    def _look(
        self,
        look: Callable[[ClusterClient, TopicSelection], ClusterState],
        planned: Collection[SourceQueue],
    ) -> SourceView:
        options = self._options
        # The archive first: what it has by now the brokers have told to somebody, and have.
        archive = self.store.existing() if self.are_both else None
        cluster = look(self.client, options.topics)
        view = SourceView(queues=cluster.queues, cluster=cluster)
        return view if archive is None else self._both(view, archive, planned)

    def check_topics(self, view: SourceView, *, waits: bool) -> None:
        """Raise BadOption for topics that were asked for by name, of which nobody has anything."""
        namespace = self._options.connection.namespace
        archived = {key.topic for key in view.archive.queues if key.namespace == namespace}

        def everything() -> set[str]:
            if view.cluster is None:
                return archived
            return archived | names_of(self.client)

        known = {queue.topic for queue in view.queues}
        check_topics(self._options, known, everything=everything, waits=waits)

    def resolve(
        self, place: ReadBoundary, view: SourceView, *, word: int
    ) -> dict[SourceQueue, int]:
        """Return the offset of a place in every queue; `word` is for queues that it leaves out.

        Raises BadOption for an offset behind the end of its queue.
        """
        if place.at_ms is not None:
            return {queue: self._at(queue, view, place.at_ms) for queue in view.queues}
        if place.group:
            progress = self._progress(place.group, view)
            # Of what only the archive has a group reads nothing any more.
            return {
                queue: _clamp(progress.get(queue.name, EARLIEST), ends)
                if view.is_at_broker(queue)
                else ends.max_offset
                for queue, ends in view.queues.items()
            }
        everywhere = word if place.everywhere is None else place.everywhere
        named = _named(place, view)
        for queue, offset in sorted(named.items()):
            end = view.queues[queue].max_offset
            if offset > end:
                raise BadOption(f"offset {offset} is given for {queue}, which ends at {end}")
        starts = {
            queue: _of_word(named.get(queue, everywhere), ends)
            for queue, ends in view.queues.items()
        }
        if place.by_queue is not None:
            # Who names places of a topic does not mean one of before, or a broker group's, that
            # only the archive has.
            alone = [each for each in view.queues if not view.is_at_broker(each)]
            starts |= {each: view.queues[each].max_offset for each in alone if each not in named}
        return starts

    def check_stops(self, view: SourceView) -> None:
        """Raise BadOption where a stream is to end in queues that are not there."""
        _named(self._options.end, view, by_name=view.is_at_broker)

    def stops(self, view: SourceView) -> Mapping[SourceQueue, int] | None:
        """Return before which offsets a stream stops, of queues it reads any of; None: nowhere.

        It looks again and again, also when a broker is away, or a topic is deleted: then a name
        means none of those of before, which the archive has.
        """
        if self._options.end.by_queue is None:
            return None
        return {
            queue: view.queues[queue].max_offset if at == LATEST else at
            for _, queue, at in _found(self._options.end, view, view.is_at_broker)
            if queue is not None
        }

    def check_start_has_messages(self, starts: Mapping[SourceQueue, int], view: SourceView) -> None:
        """Raise BadOption where an instant has no message in a queue, and that is an error."""
        if self._options.start.at_ms is None or self._options.start_strategy == "latest":
            return
        without = [queue for queue, at in starts.items() if at >= view.queues[queue].max_offset]
        if len(without) == len(starts) and starts:
            raise BadOption(
                "startingTimestamp: no queue has a message that was stored then or later; with"
                " startingTimestampStrategy=latest the read starts at the end"
            )

    def _at(self, queue: SourceQueue, view: SourceView, at_ms: int) -> int:
        if queue in view.archived_to:
            key = self._key_of(queue)
            found = first_offset_at(self.store, view.archive, key, at_ms)
            # Where the archive begins with it the broker may have some of before.
            is_first = found <= view.archive.queues[key].start
            is_before = is_first and view.queues[queue].min_offset < found
            if (
                self._options.read_mode == "archive"
                or not view.is_at_broker(queue)
                or (found < view.archived_to[queue] and not is_before)
            ):
                return found
        ends = view.queues[queue]
        if ends.max_offset == ends.min_offset:
            return ends.max_offset
        return min(ends.max_offset, max(ends.min_offset, self.client.offset_at(queue, at_ms)))

    def _progress(self, group: str, view: SourceView) -> dict[QueueName, int]:
        """Return how far a group is: by what it has acked, or pulled where it pulls."""
        found = {}
        brokers = {queue.broker for queue in view.queues if view.is_at_broker(queue)}
        for broker in sorted(brokers):
            for item in self.client.progress(broker, [group]):
                if item.is_retry:
                    continue  # Its queue is another one, of the same topic's name.
                name = QueueName(item.topic, broker, item.queue_id)
                found[name] = max(item.commit_offset, item.pull_offset)
        return found

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
        over = {queue for queue in queues if archive.queues[self._key_of(queue)].has_ended}
        return SourceView(queues=queues, archive=archive, archived_to=ends, over=over)

    def _both(
        self, view: SourceView, archive: Archive, planned: Collection[SourceQueue]
    ) -> SourceView:
        """Return what brokers and archive have together, also of queues that only one of them has.

        Of what brokers have not any more, or cannot say now, it is as much as is archived.
        """
        archived = self._archived(archive, planned)
        # Those of before come first, as in the archive.
        queues = {
            queue: ends for queue, ends in archived.queues.items() if queue not in view.queues
        }
        for queue, ends in view.queues.items():
            of = archived.queues.get(queue)
            queues[queue] = ends if of is None else _together(of, ends)
        return replace(archived, queues=queues, cluster=view.cluster)


def _bytes(archived: ArchivedQueue) -> int:
    """Return what the messages of a queue take, about, as the manifest has it."""
    return sum(each.bytes + each.rows * BESIDE_BODY_BYTES for each in archived.ranges)


def _together(archived: QueueEnds, ends: QueueEnds) -> QueueEnds:
    """Return where a queue begins and ends of which archive and broker have some each."""
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
    place: ReadBoundary, view: SourceView, *, by_name: Callable[[SourceQueue], bool] = _anyone
) -> dict[SourceQueue, int]:
    """Return the queues that a user gave offsets for. Raises BadOption where there is none."""
    found = {}
    for name, queue, offset in _found(place, view, by_name):
        if queue is not None:
            found[queue] = offset
        elif name.broker not in view.unreachable:
            raise BadOption(f"offsets are given for {name}, which is not there")
    return found


def _found(
    place: ReadBoundary, view: SourceView, by_name: Callable[[SourceQueue], bool]
) -> Iterator[tuple[QueueName, SourceQueue | None, int]]:
    """Yield the names that a user gave offsets for, each with its queue, if that is there.

    A name means the last queue of it, of those which it may mean; one before is named with its
    incarnation, `broker#LOG/7`.
    """
    last = {queue.name: queue for queue in view.queues if by_name(queue)}
    whole = {
        QueueName(queue.topic, f"{queue.broker}#{queue.incarnation}", queue.queue_id): queue
        for queue in view.queues
    }
    for topic, brokers in (place.by_queue or {}).items():
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
