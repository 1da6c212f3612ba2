"""The archive gate: pull offsets of a group report the sealed messages to brokers (ADR 0053).

The group is that of the brokers' retention, for the topics of all namespaces. Calls about the gate
therefore use full names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import final

from tidemill.message.namespaces import full_name
from tidemill_pipeline.archive.manifest import Archive, ArchivedQueue, QueueKey
from tidemill_pipeline.archive.tasks import check_follows, foreign_queue, shorter
from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import ArchiveError, ClusterRejection
from tidemill_pipeline.namespace import NamespaceNames
from tidemill_pipeline.offsets import QueueEnds, QueueName, SourceQueue
from tidemill_pipeline.options import SourceOptions


@final
class GateReporter:
    """Reports the sealed offsets of one archive to brokers.

    The callers pass a cluster state that was queried after the archive was read. The archive then
    contains no message that the cluster state lacks.
    """

    def __init__(self, options: SourceOptions, group: str) -> None:
        """Create the gate. Without a `group` it does nothing."""
        self._options = options
        self._group = group
        self._names = NamespaceNames(options.connection.namespace)
        self._connection = dataclasses.replace(options.connection, namespace="")

    def hold(self, archive: Archive, cluster: ClusterState) -> dict[SourceQueue, str]:
        """Make brokers keep unsealed messages before they are read.

        Corrects a missing offset, and an offset beyond this archive's seal, as another archive may
        have set. Returns the refused queues, with the reason. Raises ClusterRejection
        if the group does not exist.
        """
        if not self._group:
            return {}
        reported, refused = self._reported(cluster), {}
        for queue, ends in sorted(cluster.queues.items()):
            archived = archive.queues.get(self._key_of(queue))
            needed = ends.min_offset if archived is None else archived.needed_from
            if 0 <= reported.get(queue.name, -1) <= needed:
                continue
            try:
                try:
                    at = self._sealed_there(queue, ends, archived)
                except ArchiveError:
                    at = ends.min_offset  # The broker has different messages: none is sealed.
                self._report(queue, at)
            except ClusterRejection as error:
                refused[queue] = f"{queue} is not archived, as its broker refused the gate: {error}"
        return refused

    def release(
        self,
        archive: Archive,
        cluster: ClusterState,
        others: Collection[SourceQueue],
        *,
        may_be_others: bool = False,
    ) -> list[str]:
        """Report the sealed offsets to brokers, except for queues in `others`.

        `others` have the name of an archived queue but different messages. Returns a sentence for
        each other queue that was not released. With `may_be_others`, queues that turn out to have
        different messages are skipped silently. Raises ClusterRejection if the group does not
        exist.
        """
        if not self._group:
            return []
        reported, refused = self._reported(cluster), []
        for queue, ends in sorted(cluster.queues.items()):
            archived, before = archive.queues.get(self._key_of(queue)), reported.get(queue.name)
            # Brokers do not keep a queue without an offset: nothing archives it at present.
            if archived is None or queue in others or before in {None, archived.needed_from}:
                continue
            try:
                self._report(queue, self._sealed_there(queue, ends, archived))
            except ArchiveError as error:
                if not may_be_others:
                    refused.append(f"{queue} is not released: {error}")
            except ClusterRejection as error:
                refused.append(f"{queue} is not released: {error}")
        return refused

    def unreleased(self, archive: Archive, cluster: ClusterState) -> set[str]:
        """Return the other namespaces that have sealed messages to release."""
        if not self._group:
            return set()
        reported, own = self._reported(cluster), self._options.connection.namespace
        return {
            key.namespace
            for key, archived in archive.queues.items()
            if key.namespace != own
            and (queue := self._own_queue(key)) in cluster.queues
            and 0 <= reported.get(queue.name, -1) < archived.needed_from
        }

    def _own_queue(self, key: QueueKey) -> SourceQueue | None:
        """Return a queue of another namespace as this one names it; None if it cannot."""
        full = full_name(key.namespace, key.topic)
        if not self._names.have(full):
            return None
        return key.queue._replace(topic=self._names.bare(full))

    def _key_of(self, queue: SourceQueue) -> QueueKey:
        return QueueKey.of(self._options.connection.namespace, queue)

    def _sealed_there(
        self, queue: SourceQueue, ends: QueueEnds, archived: ArchivedQueue | None
    ) -> int:
        """Return the end of a queue's sealed messages.

        Raises ArchiveError if the broker's messages are not the archived ones.
        """
        if archived is None:
            return ends.min_offset
        if ends.max_offset < archived.end:
            raise foreign_queue(queue, shorter(archived, ends))
        check_follows(self._options, queue, archived.last_before(archived.needed_from))
        return archived.needed_from

    def _reported(self, cluster: ClusterState) -> dict[QueueName, int]:
        """Return the sealed offsets that the brokers know."""
        client, reported = connect(self._connection), {}
        for broker in sorted(cluster.logs):
            try:
                found = client.progress(broker, [self._group])
            except ClusterRejection as error:
                raise ClusterRejection(
                    f"{broker} keeps no messages for the archive: {error}. Create the group with"
                    f" `tidemill group create {self._group}`, or omit --gate"
                ) from error
            for each in found:
                if each.pull_offset >= 0 and self._names.have(each.topic):
                    topic = self._names.bare(each.topic)
                    reported[QueueName(topic, broker, each.queue_id)] = each.pull_offset
        return reported

    def _report(self, queue: SourceQueue, at: int) -> None:
        full = queue._replace(topic=self._names.full(queue.topic))
        connect(self._connection).update_offset(self._group, full, at)
