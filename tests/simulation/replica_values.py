"""A log of numbers as the contents of simulated replicas: quick to write and to compare.

0         4             12           16
┌────────┬─────────────┬────────────┐
│ epoch  │ value u64   │ crc32 u32  │   value 0: the epoch begins
└────────┴─────────────┴────────────┘
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, final
from zlib import crc32

from tests.simulation.replica_process import Answer, ReplicaProcess
from tests.simulation.situations import OPERATED, SITUATIONS, Situation
from tests.support.disk.claims import LastRun, after_registration, claims_clean
from tidemill.broker.engine.replication.config import AckMode
from tidemill.broker.engine.replication.epoch_journal import Journal
from tidemill.broker.engine.replication.messages import Data, Digest

if TYPE_CHECKING:
    from tests.simulation.replica_group import World

RECORD = struct.Struct(">IQI")  # epoch, value (0: the epoch begins), checksum


@final
class ValueVolume:
    """The log of a replica; its durable part survives a power cut."""

    def __init__(self, replica: ReplicaProcess, random: Random) -> None:
        self.store_uuid = f"store {replica.id}.{replica.lives}"
        self._replica = replica
        self._random = random
        self.written = bytearray()
        self.durable = 0
        self.epoch_seen = 0
        self.journal: Journal = ()
        self.confirm = 0  # saved now and then: at most the confirm offset
        self.last = LastRun("")
        self.is_stuck = False  # its syncs do not end
        self.is_full = False  # it has no room for messages of a master

    @property
    def may_lose_confirmed(self) -> bool:
        """Whether an operator has replaced a master and given up confirmed bytes."""
        return self._replica.world.was_replaced

    def open(self, _replica: ReplicaProcess, confirmed: Callable[[int], None]) -> ValueLog:
        """Open the log for a run."""
        return ValueLog(self, self._random, confirmed)

    def close(self) -> None:
        """Do nothing: written bytes survive a kill."""

    def pass_time(self) -> None:
        """Do nothing: records have no time."""

    def begin_sync(self) -> Callable[[], None]:
        """Begin a sync of all written bytes; return the function that ends it."""
        end = len(self.written)

        def finish() -> None:
            self.durable = max(self.durable, min(end, len(self.written)))

        return finish

    def claims_clean(self, mode: AckMode) -> bool:
        """Return whether this log has everything that its replica acked."""
        boot_id, last = str(self._replica.boot), self.last
        self.last = after_registration(last, boot_id=boot_id, is_accepted=False)
        return claims_clean(
            last,
            boot_id=boot_id,
            log_end=len(self.written),
            acks_are_durable=mode is AckMode.SYNC_FSYNC,
        )

    def is_registered(self) -> None:
        """Record the acceptance of the claim."""
        boot_id = str(self._replica.boot)
        self.last = after_registration(self.last, boot_id=boot_id, is_accepted=True)

    def is_member(self) -> None:
        """Do nothing: the registration was enough."""

    def log_bytes(self) -> bytes:
        """Return the whole log."""
        return bytes(self.written)

    def confirmed_bytes(self, begin: int, end: int) -> bytes:
        """Return a range of the log, confirmed or not."""
        return bytes(self.written[begin:end])

    def cut_power(self, random: Random) -> None:
        """Keep the durable bytes and a random part of the others, in whole records."""
        kept = random.randint(self.durable, len(self.written))
        del self.written[kept - kept % RECORD.size :]
        self.durable = len(self.written)
        self.confirm = min(self.confirm, self.durable)


@final
class ValueLog:
    """The log of one run: a `ReplicatedLog` over a volume."""

    def __init__(
        self, volume: ValueVolume, random: Random, confirmed: Callable[[int], None]
    ) -> None:
        self._volume = volume
        self._random = random
        self._confirmed = confirmed
        self.confirm_offset = min(volume.confirm, len(volume.written))

    @property
    def log_min(self) -> int:
        return 0

    @property
    def state_floor(self) -> int:
        return 0

    @property
    def log_end(self) -> int:
        return len(self._volume.written)

    @property
    def durable_offset(self) -> int:
        return self._volume.durable

    @property
    def applied_offset(self) -> int:
        return self.confirm_offset

    @property
    def epoch_seen(self) -> int:
        return self._volume.epoch_seen

    @property
    def journal(self) -> Journal:
        return self._volume.journal

    def save_epoch_seen(self, epoch: int) -> None:
        assert epoch >= self._volume.epoch_seen, "an epoch is never unseen"
        self._volume.epoch_seen = epoch

    def save_journal(self, journal: Journal) -> None:
        self._volume.journal = journal

    def begin_epoch(self, epoch: int) -> int:
        self.append_value(epoch, 0)
        return self.log_end

    def append_value(self, epoch: int, value: int) -> int:
        """Append a record and return its offset."""
        begin = self.log_end
        self._volume.written += RECORD.pack(epoch, value, crc32(f"{epoch} {value}".encode()))
        return begin

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        del size_max  # Frames are small, so many are in flight.
        data = bytes(self._volume.written[offset : offset + 4 * RECORD.size])
        return Data(0, offset, data, crc32(data), 0, 0, 1 << 40) if data else None

    def can_begin(self, offset: int) -> bool:
        return offset >= 0

    def has_room_for(self, size: int) -> bool:
        return size >= 0 and not self._volume.is_full

    def append(self, frame: Data) -> None:
        assert frame.offset == self.log_end, "frames follow each other"
        self._volume.written += frame.data

    def digest(self, begin: int, end: int) -> Digest:
        return Digest(begin, end, crc32(bytes(self._volume.written[begin:end])))

    def truncate(self, cut: int) -> None:
        is_allowed = cut >= self.confirm_offset or self._volume.may_lose_confirmed
        assert is_allowed, "F-5: confirmed bytes are cut"
        self.confirm_offset = min(self.confirm_offset, cut)
        self._volume.confirm = min(self._volume.confirm, cut)
        del self._volume.written[cut:]
        self._volume.durable = min(self._volume.durable, cut)

    def start_at(self, log_min: int) -> None:
        raise AssertionError(f"a log begins at {log_min}, but nothing retires segments here")

    def follow_state_floor(self, state_floor: int, stated_before: int) -> None:
        assert not state_floor, "nothing moves a state floor here"

    def confirm(self, offset: int) -> None:
        assert offset <= self.log_end, "an offset beyond the log is confirmed"
        self.confirm_offset = offset
        if self._random.random() < 0.1:
            self._volume.confirm = offset
        self._confirmed(offset)


@final
class Values:
    """Clients that send numbers, and the promises that they got."""

    mode: AckMode | None = None  # any
    situations: Mapping[str, Situation] = {**SITUATIONS, **OPERATED}

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._promised: dict[int, int] = {}  # value: log offset

    def volume(self, replica: ReplicaProcess) -> ValueVolume:
        """Return an empty volume."""
        return ValueVolume(replica, self._world.random)

    def act(self, replica: ReplicaProcess) -> Answer:
        """Send a number."""
        self._count += 1
        self._world.run.sent += 1
        value, log = self._count, replica.log
        assert isinstance(log, ValueLog), "another kind of volume"
        offset = log.append_value(replica.epoch, value)

        def record_answer() -> None:
            self._promised[value] = offset
            self._world.count_answer()

        return record_answer

    def give_up(self, confirmed: bytes) -> None:
        """Forget the promises that an operator has given up."""
        self._promised = {
            value: offset
            for value, offset in self._promised.items()
            if _is_at(confirmed, offset, value)
        }

    async def drain(self) -> None:
        """Do nothing: clients only send."""

    def judge(self, confirmed: bytes) -> None:
        """Find lost values and epochs out of order."""
        findings, epochs = self._world.findings, []
        for at in range(0, len(confirmed), RECORD.size):
            epoch, value, _ = RECORD.unpack_from(confirmed, at)
            epochs.append(epoch)
            if value == 0 and at and epoch <= epochs[-2]:
                findings.append(f"F-15: epoch {epoch} begins behind {epochs[-2]}")
        if epochs != sorted(epochs):
            findings.append("C2: epochs do not grow along the log")
        lost = [
            value
            for value, offset in self._promised.items()
            if not _is_at(confirmed, offset, value)
        ]
        if lost:
            findings.append(f"C1: {len(lost)} acknowledged messages are lost: {lost[:5]}")


def _is_at(log: bytes, offset: int, value: int) -> bool:
    """Return whether a log has a value at an offset."""
    return offset + RECORD.size <= len(log) and RECORD.unpack_from(log, offset)[1] == value
