"""What brokers keep for an archive: how far it is sealed, as a group's pull offsets (ADR 0053)."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from tidemill_pipeline.archive.manifest import Archive, ArchivedQueue, QueueKey
from tidemill_pipeline.archive.tasks import check_follows, foreign_queue, shorter
from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import ArchiveError, ClusterRejection
from tidemill_pipeline.offsets import QueueEnds, QueueName, SourceQueue
from tidemill_pipeline.options import SourceOptions


@final
class Gate:
    """Tells brokers of one archive, as the group that is theirs for it.

    Looks at brokers are given to it: behind the look at the archive, which grows beside an
    archiver, so that it has nothing that they had not.
    """

    def __init__(self, options: SourceOptions, group: str) -> None:
        """Without a `group` nobody is told anything."""
        self._options = options
        self._group = group

    def hold(self, archive: Archive, cluster: ClusterState) -> dict[SourceQueue, str]:
        """Have brokers keep what is not sealed, before it is read: what they were told is not so.

        That is nothing yet, or more than this archive has sealed, as another one had. Returns the
        queues that are not kept, and why. Raises ClusterRejection where there is no such group.
        """
        if not self._group:
            return {}
        told, refused = self._told(cluster), {}
        for queue, ends in sorted(cluster.queues.items()):
            archived = archive.queues.get(self._key_of(queue))
            needed = ends.min_offset if archived is None else archived.needed_from
            if 0 <= told.get(queue.name, -1) <= needed:
                continue
            try:
                try:
                    at = self._sealed_there(queue, ends, archived)
                except ArchiveError:
                    at = ends.min_offset  # None of it is what was sealed.
                self._tell(queue, at)
            except ClusterRejection as error:
                refused[queue] = f"{queue} is not kept, and so not archived: {error}"
        return refused

    def release(
        self,
        archive: Archive,
        cluster: ClusterState,
        others: Collection[SourceQueue],
        *,
        may_be_others: bool = False,
    ) -> list[str]:
        """Tell brokers what they need not keep any more: what is sealed, but of the `others`.

        Returns what they were not told, and why; it says nothing of the others, nor, where it is
        right that there `may_be_others`, of what turns out to be one. Raises
        ClusterRejection where there is no such group.
        """
        if not self._group:
            return []
        told, refused = self._told(cluster), []
        for queue, ends in sorted(cluster.queues.items()):
            archived, before = archive.queues.get(self._key_of(queue)), told.get(queue.name)
            # One that nothing was told of is not kept: it is archived no more, or not yet again.
            if archived is None or queue in others or before in {None, archived.needed_from}:
                continue
            try:
                self._tell(queue, self._sealed_there(queue, ends, archived))
            except ArchiveError as error:
                if not may_be_others:
                    refused.append(f"{queue} is not let go of: {error}")
            except ClusterRejection as error:
                refused.append(f"{queue} is not let go of: {error}")
        return refused

    def unreleased(self, archive: Archive, cluster: ClusterState) -> set[str]:
        """Return other namespaces of which brokers keep what is sealed."""
        if not self._group:
            return set()
        told, own = self._told(cluster), self._options.connection.namespace
        return {
            key.namespace
            for key, archived in archive.queues.items()
            if key.namespace != own
            and key.queue in cluster.queues
            and 0 <= told.get(key.queue.name, -1) < archived.needed_from
        }

    def _key_of(self, queue: SourceQueue) -> QueueKey:
        return QueueKey.of(self._options.connection.namespace, queue)

    def _sealed_there(
        self, queue: SourceQueue, ends: QueueEnds, archived: ArchivedQueue | None
    ) -> int:
        """Return up to which offset what a broker has is sealed.

        Raises ArchiveError where what it has there is not what was archived.
        """
        if archived is None:
            return ends.min_offset
        if ends.max_offset < archived.end:
            raise foreign_queue(queue, shorter(archived, ends))
        check_follows(self._options, queue, archived.last_before(archived.needed_from))
        return archived.needed_from

    def _told(self, cluster: ClusterState) -> dict[QueueName, int]:
        """Return how far brokers think that queues are sealed."""
        client, told = connect(self._options.connection), {}
        for broker in sorted(cluster.logs):
            try:
                found = client.progress(broker, [self._group])
            except ClusterRejection as error:
                raise ClusterRejection(
                    f"{broker} keeps nothing for the archive: {error}. Make the group, `tidemill"
                    f" group create {self._group}`, or go without --gate"
                ) from error
            for each in found:
                if each.pull_offset >= 0:
                    told[QueueName(each.topic, broker, each.queue_id)] = each.pull_offset
        return told

    def _tell(self, queue: SourceQueue, at: int) -> None:
        connect(self._options.connection).update_offset(self._group, queue, at)
