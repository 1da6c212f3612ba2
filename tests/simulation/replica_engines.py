"""Engines as the contents of simulated replicas, with clients of queues, timers, transactions.

    python -m tests.simulation.replica_engines --seeds 20 --first 0

Volumes are `FaultyDisk`s. Each replica is a `ReplicaEngine`. Clients call the engine of the master,
as the round loop does. An answer leaves after the group has confirmed the records before it. Then
the model records the answer, and the following promises must hold until the end of the run:

    C1  a sent message is delivered until it is acked; no other message is delivered
    C3  an ordered queue delivers no message while an earlier message is not acked
    C4  a message is not delivered again before its invisible duration has ended
    C5  an acked message is not delivered again
    C6  queue offsets are dense and unique; offsets that consumers set do not go back
    C8  a delayed message is not delivered early, and is delivered
    C9  a created topic exists
    X1  a half message that nobody committed is not delivered
    X2  a committed half message is delivered
    X4  an answer to a decision does not change
    D1  of the messages with one dedup key, one is delivered
    D3  all answers for one dedup key name the same message

At the end, an independent checker folds the log of each replica
(`tests/support/disk/log_checker.py`). If a bit of a confirmed message flips, the replica gets the
message from another replica and serves no damaged bytes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

from tests.simulation.replica_group import World, main
from tests.simulation.situations import OPERATED, SITUATIONS, Situation, Stage
from tests.support.bodies import body_of
from tests.support.disk.faulty_disk import UNBOUNDED, FaultyDisk
from tests.support.disk.log_checker import BrokenPromise, check_log
from tests.support.worlds.engine_world import ENTROPY, SMALL, blob
from tests.support.worlds.timer_world import TIMERS
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.layout.numbers import GroupId, HalfId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.dedup_policy import NO_DEDUP_CHANGE, WINDOW_MS_MAX, DedupChange
from tidemill.broker.engine.pop.consumption import AckResult, Delivery
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.replication.config import AckMode
from tidemill.broker.engine.store.damaged_ranges import MendOutcome, MendRequest
from tidemill.broker.engine.store.mending import mend
from tidemill.broker.engine.store.segment import LogDamaged
from tidemill.broker.engine.store.whole_records import find_frame
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.broker.server.replicas.mending import served
from tidemill.common.errors import InvalidTransactionId, TransactionNotFound
from tidemill.message import stored_message
from tidemill.message.dedup_key import DEDUP_PROPERTY
from tidemill.transport.grpc.status import RpcError

if TYPE_CHECKING:
    from tests.simulation.replica_process import Answer, ReplicaProcess

WALL_MS: Final = 1_700_000_000_000  # the wall time when the monotonic clock is 0
CONFIG: Final = replace(SMALL, segment_bytes=128 << 10, timer=TIMERS)
NO_ROOM_BYTES: Final = 1 << 20  # less than a replica keeps free
INVISIBLE_MS: Final = (300, 2_000, 8_000)
DELAYS_MS: Final = (50, 500, 3_000, 9_000)
FIRST_SEGMENT: Final = f"log/{0:020}.log"
ROT_S: Final = 2.0  # until a bit flips: the log has confirmed messages then
ANSWER_S_MAX: Final = 1.0  # until the next replica is asked for damaged bytes
DRAIN_S_MAX: Final = 60.0  # far more than any delay or invisible duration
ACKS_MAX: Final = 8
ACKED_PART: Final = 0.8
TOPICS_MAX: Final = 20
TOPICS: Final = ("plain", "fifo", "delayed", "half", "keyed")
DEDUP_KEYS: Final = 40


@final
class EngineVolume:
    """The disk of a replica, and the engine of its current run."""

    def __init__(self, world: World, replica: ReplicaProcess) -> None:
        self.is_stuck = False
        self.disk = FaultyDisk(Random(world.random.random()))
        self.log: ReplicaEngine
        self._world = world
        self._replica = replica
        self._identity = FreshIdentity(world.random.randbytes(16), ENTROPY)
        self._asked: MendRequest | None = None  # in flight to another replica

    @property
    def store_uuid(self) -> str:
        """The id of the store."""
        return self.log.files.store_uuid.hex()

    @property
    def is_full(self) -> bool:
        """Whether the disk has no room for messages of a master."""
        return self.disk.capacity_bytes < UNBOUNDED

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        used_bytes = self.disk.capacity_bytes - self.disk.free_bytes()
        self.disk.capacity_bytes = used_bytes + NO_ROOM_BYTES if is_full else UNBOUNDED

    def open(self, replica: ReplicaProcess, confirmed: Callable[[int], None]) -> ReplicaEngine:
        """Open the engine for a run."""
        self.log, _ = open_replica_engine(
            self.disk,
            CONFIG,
            now_ms=self.now_ms,
            fresh=self._identity,
            boot_id=(replica.boot + 1).to_bytes(16),
        )
        self.log.engine.log.damage.has_replicas = True
        self._asked = None
        self.log.on_confirmed = lambda: self._confirmed(confirmed)
        return self.log

    def close(self) -> None:
        """Leave the disk as a killed process leaves it."""
        self.disk = self.disk.after_kill()

    def cut_power(self, _random: Random) -> None:
        """Lose a random part of the bytes that are not durable."""
        self.disk = self.disk.after_power_cut()

    def _confirmed(self, report: Callable[[int], None]) -> None:
        self._apply()
        report(self.log.confirm_offset)

    def _apply(self) -> None:
        for _ in self.log.apply_slices():
            pass

    def begin_sync(self) -> Callable[[], None]:
        """Begin a sync of all written bytes; return the function that ends it."""
        log = self.log
        log.files.request_mark(log.durable_offset)
        end, files = log.engine.log.begin_sync()
        files = [*files, *log.begin_sync()]

        def finish() -> None:
            for file in files:
                file.sync()
            log.engine.log.note_synced(end)
            self._apply()

        return finish

    @property
    def now_ms(self) -> int:
        """The wall time, which is the same on all machines."""
        return WALL_MS + self._world.now_ms()

    def pass_time(self) -> None:
        """Set the time of the log, and request damaged bytes from another replica."""
        self.log.now_ms = self.now_ms
        damage, me = self.log.engine.log.damage, self._replica
        if not damage.has_requests or self._asked is not None:
            return
        others = [one.id for one in self._world.replicas if one.is_alive and one is not me]
        question = self._asked = damage.next_request(others, self.now_ms)
        if question is not None:
            other = self._world.replicas[question.replica_id]
            self._world.loop.call_later(ANSWER_S_MAX, self._mend, self.log, question, None)
            self._world.network.send(me.name, other.name, lambda: self._serve(other, question))

    def _serve(self, other: ReplicaProcess, question: MendRequest) -> None:
        if other.is_alive and not other.is_paused:
            assert isinstance(other.volume, EngineVolume), "another kind of volume"
            log = self.log
            try:
                found = served(other.volume.log, question.begin, question.end)
            except RpcError:
                return  # No answer: it derives the directory of a pack.
            self._world.network.send(
                other.name, self._replica.name, lambda: self._mend(log, question, found)
            )

    def _mend(self, log: ReplicaEngine, question: MendRequest, found: bytes | None) -> None:
        if question is not self._asked or log is not self.log or not self._replica.is_alive:
            return
        answer = MendOutcome.SILENT if found is None else MendOutcome.NOTHING
        if found:
            answer = self._write(log, question, found)
        self._asked = None
        log.engine.log.damage.handle_outcome(question, answer, self.now_ms)

    def _write(self, log: ReplicaEngine, question: MendRequest, found: bytes) -> MendOutcome:
        try:
            steps = mend(log.engine.log, self.disk, question.begin, found)
            files = [one for part in steps for one in part]
        except LogDamaged:
            return MendOutcome.SILENT
        for file in files:
            file.sync()
        return MendOutcome.MENDED if files else MendOutcome.SOUND

    def claims_clean(self, _mode: AckMode) -> bool:
        """Return whether this log has everything that its replica acked."""
        return not self.log.files.known_end.is_doubtful

    def is_registered(self) -> None:
        """Do nothing: the claim holds until the replica is a member."""

    def is_member(self) -> None:
        """Clear the doubt about the end of the log: the master has seen this run catch up."""
        self.log.files.known_end.clear_doubt()

    def log_bytes(self) -> bytes:
        """Return the whole log, also its unconfirmed part."""
        log, found = self.log.engine.log, bytearray()
        while (frame := find_frame(log, LogOffset(len(found)), 1 << 20)) is not None:
            found += frame[0]
        return bytes(found)

    def confirmed_bytes(self, begin: int, end: int) -> bytes:
        """Return the confirmed and intact records of a range."""
        found = bytearray()
        while begin + len(found) < end:
            piece = self.log.frames.read_confirmed(
                begin + len(found), 1 << 20, confirm_offset=self.log.confirm_offset
            )
            if not piece:
                break
            found += piece
        return bytes(found[: end - begin])


async def bit_flips_at_a_replica(stage: Stage) -> None:
    """A bit of a confirmed message flips on the disk of a replica."""
    await _flip(stage, stage.third)


async def bit_flips_at_the_master(stage: Stage) -> None:
    """A bit of a confirmed message flips on the disk of the master."""
    await _flip(stage, stage.master)


async def _flip(stage: Stage, victim: ReplicaProcess) -> None:
    await asyncio.sleep(ROT_S)
    volume = victim.volume
    assert isinstance(volume, EngineVolume), "another kind of contents"
    log, random = volume.log, stage.world.random
    end = log.confirm_offset
    volume.disk.damage(
        FIRST_SEGMENT,
        random.randrange(min(end, CONFIG.segment_bytes)),
        bits=1 << random.randrange(8),
    )
    # A read finds the damage. This one reads everything, as a check of the log does.
    if len(volume.confirmed_bytes(0, end)) < end:
        await stage.until(lambda: log.engine.log.damage.mended_count > 0)
    if len(volume.confirmed_bytes(0, end)) < end:
        stage.world.findings.append(f"row 25: {victim.name} is damaged and not mended")


@dataclass
class ReceivedMessage:
    """One message that a client has received."""

    key: str
    topic: str
    delivery: Delivery
    offset: int
    popped_at_ms: int


@final
class Clients:
    """Clients of engines, with their requests and the answers."""

    mode: AckMode | None = AckMode.SYNC_FSYNC  # engines know their ends only in this mode
    situations: Mapping[str, Situation] = {
        **SITUATIONS,
        **{name: OPERATED[name] for name in ("forgotten while cut off", "forgotten while down")},
        "a bit flips at a replica": Situation(bit_flips_at_a_replica),
        "a bit flips at the master": Situation(bit_flips_at_the_master),
    }

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._is_draining = False
        self._counts = dict.fromkeys(TOPICS, 0)
        self._halves: dict[HalfId, str] = {}  # acknowledged half messages, by key
        # By half message: the decisions that were asked for, and the acknowledged one.
        self._decisions_asked: dict[HalfId, set[str]] = {}
        self._decided: dict[HalfId, str] = {}
        self._firsts: dict[str, str] = {}  # by dedup key: the message in its answers
        self._keyed: dict[str, str] = {}  # by message: its dedup key
        self._asked: set[str] = set()  # keys of all sends
        self._sent: set[str] = set()  # keys of acknowledged sends
        self._due_ms: dict[str, int] = {}
        self._keys: dict[tuple[str, int], str] = {}  # by topic and queue offset
        self._acked: dict[str, int] = {}  # by key: the log offset after which it is acked
        self._ack_asked: set[str] = set()
        self._deliveries: dict[str, list[ReceivedMessage]] = {}
        self._held: list[ReceivedMessage] = []
        self._created: set[str] = set()
        self._pulled: dict[str, int] = {}

    def volume(self, replica: ReplicaProcess) -> EngineVolume:
        """Return an empty volume."""
        return EngineVolume(self._world, replica)

    def act(self, replica: ReplicaProcess) -> Answer:
        """Send a random request; due timers fire before it."""
        assert isinstance(replica.volume, EngineVolume), "another kind of volume"
        self._engine, self._now_ms = replica.volume.log.engine, replica.volume.now_ms
        engine, now_ms = self._engine, self._now_ms
        missing = self._missing()
        engine.deduplication.note_time(now_ms, now_ms)
        engine.run_due(now_ms, firing_ms=now_ms)
        answer = self._choose()()
        engine.write(now_ms)

        def record_answer() -> None:
            # A deposed master lacks newer records, but it confirms nothing.
            for finding in missing:
                self._add_finding(finding)
            answer()
            self._world.count_answer()

        return record_answer

    def _choose(self) -> Callable[[], Answer]:
        # A master may die between the two records of a topic and its group.
        groups = {one.name for one in self._engine.catalog.groups.values()}
        for name in TOPICS:
            if name not in self._names() or f"of {name}" not in groups:
                return functools.partial(self._create, name)
        takes: list[Callable[[], Answer]] = [self._pop, self._pop, self._ack, self._ack]
        if self._is_draining:
            return self._random.choice(takes)
        sends = [self._send, self._send, self._send_ordered, self._delay]
        sends.append(self._send_keyed)
        others = [self._create_another, self._pull, self._send_half, self._decide, self._decide]
        return self._random.choice([*takes, *sends, *sends, *others])

    # ------------------------------------------------------------ requests

    def _names(self) -> set[str]:
        return {one.name for one in self._engine.catalog.topics.values()}

    def _create(self, name: str) -> Answer:
        administration, now_ms = self._engine.administration, self._now_ms
        type_ = {"fifo": TopicType.FIFO, "half": TopicType.TRANSACTION}.get(name, TopicType.NORMAL)
        # The window is longer than a run.
        change = DedupChange(is_on=True, window_ms=WINDOW_MS_MAX)
        dedup = change if name == "keyed" else NO_DEDUP_CHANGE
        administration.put_topic(name, type_=type_, queues=1, dedup=dedup, now_ms=now_ms)
        administration.put_group(
            f"of {name}", is_ordered=name == "fifo", max_attempts=1_000, now_ms=now_ms
        )
        return lambda: self._created.add(name)

    def _create_another(self) -> Answer:
        return self._create(f"made-{self._random.randrange(TOPICS_MAX)}")

    def _send(self) -> Answer:
        return self._store("plain")

    def _send_ordered(self) -> Answer:
        return self._store("fifo")

    def _delay(self) -> Answer:
        return self._store("delayed", self._now_ms + self._random.choice(DELAYS_MS))

    def _store(self, topic: str, due_ms: int = 0) -> Answer:
        self._world.run.sent += 1
        self._counts[topic] += 1
        key, size = f"{topic}-{self._counts[topic]}", self._random.choice((0, 30, 700))
        self._asked.add(key)
        data, crc = blob(key, size=size), 0
        if due_ms:
            data = blob(key, size=size, kind=stored_message.TYPE_DELAY)
            patched, crc = with_due_time(data, crc32(data), due_ms)
            data = bytes(patched)
        found = self._engine.catalog.find_topic(topic)
        assert found is not None, "the topic does not exist"
        offset, _ = self._engine.commands.send(
            found.id,
            QueueId(0),
            data,
            crc or crc32(data),
            now_ms=self._now_ms,
            firing_ms=self._now_ms,
        )

        def record_answer() -> None:
            self._sent.add(key)
            if due_ms:
                self._due_ms[key] = due_ms
            elif (known := self._keys.setdefault((topic, offset), key)) != key:
                self._add_finding(f"C6: {known} and {key} are at offset {offset}")

        return record_answer

    def _send_keyed(self) -> Answer:
        """Send a message with one of few dedup keys."""
        self._counts["keyed"] += 1
        key, dedup_key = f"keyed-{self._counts['keyed']}", f"k{self._random.randrange(DEDUP_KEYS)}"
        self._keyed[key] = dedup_key
        data = blob(key, properties={DEDUP_PROPERTY: dedup_key})
        found = self._engine.catalog.find_topic("keyed")
        assert found is not None, "the topic does not exist"
        first = key
        try:
            self._engine.commands.send(
                found.id, QueueId(0), data, crc32(data), now_ms=self._now_ms, firing_ms=self._now_ms
            )
            self._asked.add(key)
        except RepeatedSend as repeat:
            first = repeat.first.message_id.removeprefix("id-")

        def record_answer() -> None:
            known = self._firsts.setdefault(dedup_key, first)
            if known != first:
                self._add_finding(f"D3: {dedup_key} was answered with {known}, then {first}")
            self._sent.add(first)

        return record_answer

    def _send_half(self) -> Answer:
        self._counts["half"] += 1
        key = f"half-{self._counts['half']}"
        data = blob(key, kind=stored_message.TYPE_TRANSACTION)
        found = self._engine.catalog.find_topic("half")
        assert found is not None, "the topic does not exist"
        half_id, _ = self._engine.commands.send(
            found.id,
            QueueId(0),
            data,
            crc32(data),
            now_ms=self._now_ms,
            firing_ms=self._now_ms,
            sender=HalfSender(),
        )

        def record_answer() -> None:
            self._halves[HalfId(half_id)] = key

        return record_answer

    def _decide(self) -> Answer:
        """Commit a half message or roll it back, also one that is decided already."""
        if not self._halves:
            return self._send_half()
        half_id = self._random.choice(list(self._halves))
        key, decision = (
            self._halves[half_id],
            self._random.choice(("commit", "commit", "roll back")),
        )
        asked = self._decisions_asked.setdefault(half_id, set())
        earlier = set(asked)
        asked.add(decision)
        if decision == "commit":
            self._asked.add(key)
        transactions = self._engine.transactions
        try:
            if decision == "commit":
                transactions.commit(half_id, now_ms=self._now_ms, firing_ms=self._now_ms)
            else:
                transactions.roll_back(half_id, now_ms=self._now_ms)
        except (InvalidTransactionId, TransactionNotFound) as error:
            finding = f"X4: {key} cannot {decision} after {earlier or 'nothing'}: {error.message}"
            is_expected = bool(earlier - {decision})
            return lambda: None if is_expected else self._add_finding(finding)
        known = self._decided.get(half_id, decision)

        def record_answer() -> None:
            if known != decision or self._decided.setdefault(half_id, decision) != decision:
                self._add_finding(f"X4: {key} was answered with {known}, then {decision}")
            if decision == "commit":
                self._sent.add(key)

        return record_answer

    def _pop(self) -> Answer:
        topic = self._random.choice(TOPICS)
        invisible_ms = self._random.choice(INVISIBLE_MS)
        group_id, topic_id = self._ids(topic)
        batches = self._engine.commands.pop(
            group_id,
            topic_id,
            max_messages=self._random.randint(1, 8),
            invisible_duration_ms=invisible_ms,
            attempt_id="",
            now_ms=self._now_ms,
        )
        received = []
        for one in batches:
            batch, records = self._engine.consumption.read_batch(one)
            for index, record, offset in zip(
                batch.indexes, records, batch.queue_offsets, strict=True
            ):
                delivery = Delivery(
                    group_id, topic_id, batch.slot, batch.delivery_id, index, batch.visible_at_ms
                )
                key = body_of(record.blob).decode().rstrip(".")
                received.append(ReceivedMessage(key, topic, delivery, offset, self._now_ms))
        asked = set(self._ack_asked)
        return lambda: self._receive(received, asked)

    def _ids(self, topic: str) -> tuple[GroupId, TopicId]:
        group = self._engine.catalog.find_group(f"of {topic}")
        found = self._engine.catalog.find_topic(topic)
        assert group is not None, "the group does not exist"
        assert found is not None, "the topic does not exist"
        return group.id, found.id

    def _ack(self) -> Answer:
        """Ack some of the held messages; some messages are never acked."""
        held = [one for one in self._held if one.delivery.visible_at_ms > self._now_ms]
        self._random.shuffle(held)
        count = len(held) if self._is_draining else self._random.randint(0, ACKS_MAX)
        some, self._held = held[:count], held[count:]
        if not self._is_draining:
            some = [one for one in some if self._random.random() < ACKED_PART]
        done = (AckResult.APPLIED, AckResult.ALREADY)
        acked = {
            one.key for one in some if self._engine.commands.ack(one.delivery, self._now_ms) in done
        }
        self._ack_asked |= acked
        begin = self._engine.log.log_end
        return lambda: self._acked.update(dict.fromkeys(acked, begin))

    def _pull(self) -> Answer:
        """Advance the pull offset of a group."""
        group_id, topic_id = self._ids("plain")
        key = group_id, topic_id, QueueId(0)
        end = self._engine.catalog.queue(topic_id, QueueId(0)).max_offset
        known = self._engine.catalog.pull_offsets.find(key) or 0
        offset = self._random.randint(known, max(known, end))
        self._engine.administration.update_pull_offset(*key, offset, self._now_ms)

        def record_answer() -> None:
            self._pulled["plain"] = offset

        return record_answer

    # ------------------------------------------------------------ invariants

    def _add_finding(self, finding: str) -> None:
        self._world.findings.append(finding)

    def _receive(self, received: list[ReceivedMessage], asked: set[str]) -> None:
        # Compare in log order: an answer of a paused master may arrive late.
        for one in received:
            at = one.delivery.delivery_id
            if one.key not in self._asked:
                self._add_finding(f"C1: {one.key} was not sent")
            if self._acked.get(one.key, at) < at:
                self._add_finding(f"C5: {one.key} is delivered after its ack")
            if self._due_ms.get(one.key, 0) > one.popped_at_ms:
                self._add_finding(f"C8: {one.key} is delivered early")
            dedup_key = self._keyed.get(one.key)
            if dedup_key is not None:
                first = self._firsts.setdefault(dedup_key, one.key)
                if first != one.key:
                    self._add_finding(f"D1: {dedup_key} is stored as {first} and {one.key}")
            known = self._deliveries.setdefault(one.key, [])
            known.append(one)
            known.sort(key=lambda other: other.delivery.delivery_id)
            for earlier, later in itertools.pairwise(known):
                if later.popped_at_ms < earlier.delivery.visible_at_ms:
                    self._add_finding(f"C4: {one.key} is delivered while it is invisible")
        self._check_order([one for one in received if one.topic == "fifo"], asked)
        self._held += received

    def _check_order(self, received: list[ReceivedMessage], asked: set[str]) -> None:
        """Check C3: earlier messages are acked or in the same batch."""
        if not received:
            return
        together = {one.key for one in received}
        for (topic, offset), key in self._keys.items():
            if topic == "fifo" and offset < received[0].offset and key not in asked | together:
                self._add_finding(f"C3: {received[0].key} is delivered before the ack of {key}")

    def _missing(self) -> list[str]:
        """Return the acknowledged topics and pull offsets that this engine lacks: C9 and C6."""
        catalog = self._engine.catalog
        groups = {one.name for one in catalog.groups.values()}
        found = [
            f"C9: {name} or its group is missing"
            for name in sorted(self._created)
            if name not in self._names() or f"of {name}" not in groups
        ]
        for topic, offset in self._pulled.items() if not found else ():
            if (catalog.pull_offsets.find((*self._ids(topic), QueueId(0))) or 0) < offset:
                found.append(f"C6: the offset {offset} of {topic} went back")
        return found

    def give_up(self, confirmed: bytes) -> None:
        """See Contents."""
        raise AssertionError(f"no operator gives up bytes here: {len(confirmed)} are confirmed")

    async def drain(self) -> None:
        """Receive until all acknowledged sends are acked."""
        self._is_draining = True
        await self._world.until(lambda: not self._backlog(), DRAIN_S_MAX)
        if keys := sorted(self._backlog()):
            self._add_finding(f"C1, C8: {len(keys)} messages were not delivered: {keys[:5]}")
        self._world.sends = False

    def _backlog(self) -> set[str]:
        return self._sent - self._ack_asked

    def judge(self, confirmed: bytes) -> None:
        """Check the log of each running replica."""
        assert confirmed, "nothing is confirmed"
        for replica in self._world.replicas:
            if not replica.is_alive:
                continue
            assert isinstance(replica.volume, EngineVolume), "another kind of volume"
            try:
                check_log(replica.volume.disk)
            except BrokenPromise as broken:
                self._add_finding(f"{replica.name}, {broken}")


if __name__ == "__main__":
    main(Clients)
