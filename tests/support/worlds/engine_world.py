"""An engine on a `FaultyDisk`. The world calls it like the broker's round loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any, TypedDict, Unpack
from zlib import crc32

from tests.support.bodies import filled, text_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.following import Follower
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.configuration.purge import PurgedQueue
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import Topic, TopicType
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery, DeliveryBatch
from tidemill.broker.engine.queries.queue_reader import FoundMessage
from tidemill.broker.engine.recovery import RecoveryReport, open_engine
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.server.wire.filters import find_filter
from tidemill.message import stored_message
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

ENTROPY = bytes(range(32))
SMALL = EngineConfig(
    segment_bytes=1 << 20,
    checkpoint_log_bytes=256 << 10,
    files_merged=3,
    disk_reserve_bytes=0,
    auto_create_topics=True,
    auto_create_groups=True,
    recreate_block_ms=0,  # most tests create deleted names again at once
    default_queues=1,
    # A wheel of 14 days has 38 MB, and each start clears it.
    timer=TimerConfig(wheel_slots=4_096),
)
TOPIC = "orders"
GROUP = "billing"


def forget_event_lookups(engine: Engine) -> None:
    """Clear the caches of events. The next reader looks up names and messages in the log again."""
    lookup = engine.events.lookup
    lookup._messages.clear()
    lookup._deliveries.clear()


def blob(
    text: str,
    *,
    message_id: str = "",
    tag: str = "",
    keys: tuple[str, ...] = (),
    properties: Mapping[str, str] = MappingProxyType({}),
    size: int = 0,
    kind: int = 1,
) -> bytes:
    """Build a stored message whose body is `text`, as short as the format allows."""
    id_bytes, tag_bytes = (message_id or f"id-{text}").encode(), tag.encode()
    system = id_bytes + tag_bytes + b"".join(key.encode() for key in keys)
    user = v2.Message(user_properties=properties).SerializeToString(deterministic=True)
    body = filled(text, size)
    hashes = [stored_message.key_hash("id", id_bytes.decode())]
    hashes += [stored_message.key_hash("key", key) for key in keys]
    fixed = stored_message.FIXED.pack(
        stored_message.VERSION,
        kind,
        1,
        len(hashes),
        0,
        len(id_bytes),
        len(id_bytes),
        len(tag_bytes),
        0,
        0,
        len(system),
        len(user),
        len(body),
        stored_message.tag_hash(tag) if tag else 0,
        0,
        0,
    )
    return fixed + b"".join(h.to_bytes(8, "big") for h in hashes) + system + user + body


class PopOptions(TypedDict, total=False):
    """Options of a pop."""

    group: str
    topic: str
    invisible_ms: int
    tags: tuple[str, ...]
    sql: str
    attempt_id: str
    client_id: str
    owner: int
    renews: bool


def derive_directories(engine: Engine) -> int:
    """Derive the damaged directories of packs, as the background does; return their number."""
    count = 0
    while engine.rebuilds.has_directory:
        for _ in engine.rebuilds.derive_directory():
            pass
        count += 1
    return count


class World:
    """One engine with its disk and clock."""

    monotonic_ms: int | None = None  # set if the wall clock can be wrong

    def __init__(
        self,
        disk: FaultyDisk | None = None,
        *,
        config: EngineConfig = SMALL,
        now_ms: int = 1_000_000,
        is_followed: bool = False,
        **changes: object,
    ) -> None:
        """Open an engine. A followed engine gets a second one that reads its log from the start."""
        self.config = replace(config, **changes)  # type: ignore[arg-type]  # checked by replace
        self.disk = disk or FaultyDisk(Random(0))
        self.now_ms = now_ms
        self._latest_ms = now_ms
        self.engine: Engine
        self.report: RecoveryReport
        self.follower = Follower(self.config) if is_followed else None
        self.open()
        self._has_restarted = False

    def open(self) -> None:
        """Start the engine on the current disk."""
        self._has_restarted = True
        self.engine, self.report = open_engine(
            self.disk, self.config, now_ms=self.now_ms, entropy=ENTROPY
        )

    def restart(self, *, power_cut: bool = False) -> None:
        """Kill the process or cut the power, and start again."""
        self.disk = self.disk.after_power_cut() if power_cut else self.disk.after_kill()
        self.open()

    def fail_over(self) -> None:
        """Continue with the second engine. A new engine follows it from the first byte."""
        assert self.follower is not None, "somebody follows"
        self.follow()
        self.follower.compare_deeply(self.engine)
        self.disk = self.follower.disk
        self.engine = self.follower.take_over(self.now_ms)
        self.follower = Follower(self.config)
        self._has_restarted = False
        self.follow()

    def follow(self) -> None:
        """Give the second engine the committed bytes, and compare both engines."""
        if self.follower is not None:
            self.follower.feed(self.engine, self.now_ms)
            self._note_time()
            self.follower.compare(self.engine, self._latest_ms, has_restarted=self._has_restarted)

    def _note_time(self) -> None:
        # An entry that left a table at its deadline does not return if the clock goes back.
        self._latest_ms = max(self._latest_ms, self.now_ms)

    def commit(self) -> None:
        """End the round: write and sync it, and pass it to the second engine, if there is one.

        A round without records is compared together with the next round that has some.
        """
        before = self.engine.log.committed_offset
        self.engine.commit(self.now_ms)
        if self.engine.log.committed_offset != before:
            self.follow()

    def react(self, what: Callable[..., object], *arguments: Any) -> None:
        """Call `what`, a client's reaction to the answer of the last round."""
        what(*arguments)

    def settle(self) -> None:
        """Commit all rounds."""

    # ------------------------------------------------------------ commands, each a round

    def topic(self, name: str = TOPIC, *, queues: int = 1) -> TopicId:
        topic = self.engine.catalog.find_topic(name) or self.engine.administration.put_topic(
            name, type_=TopicType.NORMAL, queues=queues, now_ms=self.now_ms
        )
        self.commit()
        return topic.id

    def group(self, name: str = GROUP, **options: object) -> GroupId:
        group = self.engine.catalog.find_group(name) or self.engine.administration.put_group(
            name,
            now_ms=self.now_ms,
            **options,  # type: ignore[arg-type]  # the caller's business
        )
        self.commit()
        return group.id

    def send(
        self,
        *texts: str,
        topic: str = TOPIC,
        queue_id: int = 0,
        tag: str = "",
        properties: Mapping[str, str] = MappingProxyType({}),
        size: int = 0,
    ) -> None:
        topic_id = self.topic(topic)
        for text in texts:
            data = blob(text, tag=tag, properties=properties, size=size)
            self.engine.commands.send(
                TopicId(topic_id),
                QueueId(queue_id),
                data,
                crc32(data),
                now_ms=self.now_ms,
                firing_ms=self.now_ms,
            )
        self.commit()

    def pop(
        self,
        want: int = 32,
        *,
        group: str = GROUP,
        topic: str = TOPIC,
        invisible_ms: int = 30_000,
        tags: tuple[str, ...] = (),
        sql: str = "",
        attempt_id: str = "",
        client_id: str = "",
        owner: int = NO_OWNER,
        renews: bool = False,
        level_min: int = 0,
        priority_factor: int | None = None,
        level_below: int = 0,
    ) -> list[PoppedMessage]:
        """Perform due revives, pop, and return the messages with their deliveries."""
        self.run_due()
        ids = self.group(group), self.topic(topic)
        batches = self.engine.commands.pop(
            *ids,
            max_messages=want,
            invisible_duration_ms=invisible_ms,
            wanted=find_filter(tags, sql),
            attempt_id=attempt_id,
            client=ClientKey(client_id, owner),
            renews=renews,
            now_ms=self.now_ms,
            level_min=level_min,
            priority_factor=priority_factor,
            level_below=level_below,
        )
        popped = [one for batch in batches for one in self._popped(batch, *ids, owner)]
        self.commit()
        return popped

    def _popped(
        self, batch: DeliveryBatch, group_id: int, topic_id: int, owner: int
    ) -> list[PoppedMessage]:
        batch, records = self.engine.consumption.read_batch(batch)
        return [
            PoppedMessage(
                text_of(record.blob),
                Delivery(
                    GroupId(group_id),
                    TopicId(topic_id),
                    batch.slot,
                    batch.delivery_id,
                    index,
                    batch.visible_at_ms,
                    owner,
                ),
                attempt,
                offset,
                record.origin_topic,
            )
            for record, index, attempt, offset in zip(
                records, batch.indexes, batch.delivery_attempts, batch.queue_offsets, strict=True
            )
        ]

    def bodies(self, want: int = 32, **options: Unpack[PopOptions]) -> list[str]:
        return [one.body for one in self.pop(want, **options)]

    def drain(self, **options: Unpack[PopOptions]) -> list[str]:
        """Pop until the queue is empty, without acks, and return the bodies.

        Some come only after the damaged directory of a pack is derived.
        """
        bodies: list[str] = []
        while True:
            while more := self.bodies(**options):
                bodies += more
            if not derive_directories(self.engine):
                return bodies
            self.run_due()

    def ack(self, *popped: PoppedMessage) -> list[AckResult]:
        results = [self.engine.commands.ack(one.delivery, self.now_ms) for one in popped]
        self.commit()
        return results

    def change(
        self, popped: PoppedMessage, invisible_ms: int, *, suspend: bool = False
    ) -> PoppedMessage:
        delivery = self.engine.commands.change_invisible(
            popped.delivery, invisible_duration_ms=invisible_ms, suspend=suspend, now_ms=self.now_ms
        )
        self.commit()
        return PoppedMessage(popped.body, delivery, popped.attempt, popped.offset, "")

    def give_back(self, *popped: PoppedMessage) -> None:
        """Give back messages that have not left a proxy."""
        for one in popped:
            self.engine.commands.give_back(
                one.delivery, invisible_duration_ms=0, now_ms=self.now_ms
            )
        self.commit()

    def alive(self, *client_ids: str, owner: int = NO_OWNER) -> None:
        """Report signs of life."""
        now_ms = self.now_ms if self.monotonic_ms is None else self.monotonic_ms
        self.engine.consumption.renewals.note_alive(
            [ClientKey(one, owner) for one in client_ids], monotonic_ms=now_ms
        )

    def end(self, *client_ids: str, owner: int = NO_OWNER) -> None:
        """Report that clients have ended, and run all due work."""
        self.engine.commands.end_clients([ClientKey(one, owner) for one in client_ids])
        self.run_due()

    def revoke(
        self, client_id: str, *, owner: int = NO_OWNER, group: str = "", topic: str = ""
    ) -> None:
        """Report that a client has lost a right, and run all due work."""
        self.engine.commands.revoke_deliveries(
            ClientKey(client_id, owner), group=group, topic=topic
        )
        self.run_due()

    def disconnect(self, *client_ids: str, owner: int = NO_OWNER) -> None:
        """Report that clients have no connection, and run all due work."""
        now_ms = self.now_ms if self.monotonic_ms is None else self.monotonic_ms
        self.engine.commands.disconnect_clients(
            [ClientKey(one, owner) for one in client_ids], monotonic_ms=now_ms
        )
        self.run_due()

    def purge(
        self,
        topic: str = TOPIC,
        *,
        queue_id: int = 0,
        low: int | None = None,
        with_retries: bool = False,
    ) -> int:
        """Purge a queue before `low`, or all of it; return the number of messages removed."""
        self.topic(topic)
        found = self.engine.catalog.find_topic(topic)
        assert found is not None
        first, *retries = self.engine.purge.topics_of(found, with_retries=with_retries)
        queues = [PurgedQueue(first.id, QueueId(queue_id), low)]
        queues += [PurgedQueue(one.id, QueueId(0), low) for one in retries]
        counting = self.engine.purge.count(queues)
        while counting.step():
            pass
        for _ in self.engine.purge.purge(queues, self.now_ms):
            pass
        self.commit()
        return counting.messages

    def release_lock(self, *, group: str = GROUP, topic: str = TOPIC, queue_id: int = 0) -> None:
        """Release the deliveries that lock an ordered queue. Raises Conflict."""
        key = self.group(group), self.topic(topic), QueueId(queue_id)
        self.engine.administration.release_lock(key, self.now_ms)
        self.commit()

    def run_due(self) -> None:
        """Revive all due messages."""
        self._note_time()
        for _ in range(100_000):
            is_more = self.engine.run_due(
                self.now_ms, firing_ms=self.now_ms, monotonic_ms=self.monotonic_ms
            )
            self.commit()
            if not is_more:
                return
        raise AssertionError("revive does not come to an end")

    def advance(self, duration_ms: int) -> None:
        """Advance the clock and run all due work."""
        self.now_ms += duration_ms
        self.run_due()

    def leave_room(self, free_bytes: int) -> None:
        """Resize the disk so that it has `free_bytes` free."""
        self.disk.capacity_bytes += free_bytes - self.disk.free_bytes()
        self.engine.room.measure()

    def find(self, topic: Topic, *, message_id: str = "", key: str = "") -> list[FoundMessage]:
        """Look messages up by id or key."""
        search = self.engine.inspection.search(topic, message_id=message_id, key=key)
        found: list[FoundMessage] = []
        has_more = True
        while has_more:
            has_more = search.step()
            found += search.take()
        return found

    def checkpoint(self, between: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint. Call `between` after each slice that does not need quiet."""
        for files in self.engine.checkpoints.write():
            for file in files:
                file.sync()
            if self.engine.background.needs_quiet:
                self.settle()
            else:
                between()

    def retire(self) -> None:
        for files in self.engine.retention.retire_oldest(self.now_ms):
            for file in files:
                file.sync()
            if has_pending(self.engine):
                self.commit()

    def background(
        self, steps: int = 10_000, *, between: Callable[[], None] = lambda: None
    ) -> None:
        """Run background work until it is done; call `between` after slices, as `checkpoint`.

        It begins with a look of retention at all queues, as after 10 s.
        """
        self.engine.retention.request_look()
        for _ in range(steps):
            files = self.engine.background.step(
                self.now_ms, firing_ms=self.now_ms, monotonic_ms=self.monotonic_ms
            )
            if files is None:
                return
            for file in files:
                file.sync()
            if has_pending(self.engine):
                self.commit()
            if not self.engine.background.needs_quiet:
                between()
        raise AssertionError("background work does not come to an end")


class PoppedMessage:
    """One message as a consumer received it."""

    def __init__(
        self, body: str, delivery: Delivery, attempt: int, offset: int, origin: str
    ) -> None:
        self.body = body
        self.delivery = delivery
        self.attempt = attempt
        self.offset = offset
        self.origin = origin

    def __repr__(self) -> str:
        return f"{self.body}@{self.offset}#{self.attempt}"
