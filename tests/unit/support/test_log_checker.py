"""The log checker accepts logs of the engine and names the promise that a forged record breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.disk.log_checker import BrokenPromise, check_log, judge
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout import ack, message, pop_checkpoint, renewal
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.layout.message import Cause, Reason
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason

FIFO = "fifo"
START = 1_000_000


class Forger:
    """Writer of records that contradict the records before them in the log."""

    def __init__(self) -> None:
        self.world = World(now_ms=START)
        self.copies = 0
        self.topic_id = self.world.topic()
        self.group_id = self.world.group()
        self.fifo_id = self.world.group(FIFO, is_ordered=True)
        self.world.send(*[f"m{n}" for n in range(8)])
        self.popped = self.world.pop(3, invisible_ms=10_000)
        self.ordered = self.world.pop(3, group=FIFO, invisible_ms=10_000)
        self.world.ack(self.popped[0], self.ordered[0])

    def append(self, kind: RecordKind, body: bytes, *, after_ms: int = 0) -> None:
        self.world.engine.log.append(kind, body, START + after_ms)
        self.world.commit()

    def ck(
        self,
        slot: int,
        start: int,
        count: int,
        *,
        after_ms: int = 0,
        ordered: bool = False,
        next_offset: int = 8,
        superseded: tuple[int, int, int] | None = None,
    ) -> None:
        group_id = self.fifo_id if ordered else self.group_id
        flags = pop_checkpoint.FLAG_ORDERED if ordered else 0
        extra = b""
        if superseded is not None:
            flags |= pop_checkpoint.FLAG_SUPERSEDES
            extra += pop_checkpoint.SUPERSEDED.pack(*superseded)
        if ordered:
            extra += pop_checkpoint.ATTEMPTS[count].pack(*[1] * count) + b"\0"
        body = pop_checkpoint.BODY.pack(
            slot, group_id, self.topic_id, 0, count, flags, 0, start, START + 60_000, next_offset
        )
        self.append(RecordKind.CK, body + extra, after_ms=after_ms)

    def settle(self, index: int) -> None:
        one = self.popped[index].delivery
        self.append(
            RecordKind.ACK, ack.ENTRY.pack(one.slot, one.delivery_id, 1 << one.message_index)
        )

    def revive(self, *, after_ms: int, reason: Reason = Reason.INVISIBLE_DURATION_ENDED) -> None:
        one = self.popped[1].delivery
        cause = Cause(
            GroupId(self.group_id),
            one.slot,
            one.delivery_id,
            one.message_index,
            reason,
            START,
            TopicId(self.topic_id),
            QueueId(0),
            1,
            "orders",
        )
        body = message.PLACE.pack(99, 0, 1, self.copies) + message.encode_cause(cause)
        self.world.engine.log.append(
            RecordKind.MESSAGE, body, START + after_ms, flags=message.FLAG_CAUSE
        )
        self.copies += 1
        self.world.commit()

    def reset(self, offset: int) -> None:
        config = {"op": "reset", "group_id": self.group_id, "offsets": [[self.topic_id, 0, offset]]}
        self.append(RecordKind.CONFIG, encode_item(config))


def change_twice(forger: Forger) -> None:
    old = forger.popped[1].delivery
    for slot in (50, 51):
        forger.ck(slot, 1, 1, superseded=(old.slot, old.delivery_id, old.message_index))


def twice(command: Callable[[Forger], None]) -> Callable[[Forger], None]:
    def both(forger: Forger) -> None:
        command(forger)
        command(forger)

    return both


def renew(forger: Forger) -> None:
    one = forger.popped[1].delivery
    entries: list[tuple[int, int]] = [(one.slot, one.delivery_id)]
    body = renewal.encode(Renewal(START + 60_000, RenewalReason.HANDED_OVER, "", entries))
    forger.append(RecordKind.RENEW, body)


def reset_and_renew(forger: Forger) -> None:
    forger.reset(0)
    renew(forger)


@pytest.mark.parametrize(
    ("forge", "number"),
    [
        (lambda f: f.settle(0), "12: an ack"),
        (lambda f: f.ck(50, 0, 1, after_ms=99_000, next_offset=3), "13: .* taken already"),
        (lambda f: f.ck(50, 2, 2), "13: .* taken already"),
        (lambda f: f.revive(after_ms=9_999), "13: .* revived before its deadline"),
        (reset_and_renew, "13: .* is renewed, and is void"),
        (twice(lambda f: f.revive(after_ms=10_000)), "14: a second copy"),
        (change_twice, "16: .* replaces what is not live"),
        (lambda f: f.ck(50, 3, 1, next_offset=2), "21: pop offset back"),
        (lambda f: f.ck(f.popped[1].delivery.slot, 3, 1), "26: slot"),
        (lambda f: f.ck(50, 6, 3), "4: .* before they were sent"),
        (lambda f: f.ck(50, 1, 2, ordered=True), "30: a batch is out"),
        (lambda f: f.ck(50, 0, 2, ordered=True, after_ms=10_000), "31: redelivered"),
        (lambda f: f.ck(50, 3, 2, ordered=True, after_ms=10_000), "31: .* left behind"),
        (lambda f: f.ck(50, 2, 2, ordered=True, after_ms=10_000), "31: redelivered"),
    ],
)
def test_a_forged_record_breaks_the_promise_of_its_number(
    forge: Callable[[Forger], None], number: str
) -> None:
    forger = Forger()
    judge(forger.world)
    forge(forger)
    with pytest.raises(BrokenPromise, match=number):
        check_log(forger.world.disk)


def test_a_consumer_offset_beyond_a_lost_message_breaks_the_second_promise() -> None:
    forger = Forger()
    checker = check_log(forger.world.disk)
    key = forger.group_id, forger.topic_id, 0
    checker.check_positions({key: (3, 3)})
    checker.queues[key].live.pop(2)
    with pytest.raises(BrokenPromise, match=r"2: 2 of .* nowhere"):
        checker.check_positions({key: (3, 3)})
    with pytest.raises(BrokenPromise, match=r"3: .* pop offset 2"):
        checker.check_positions({key: (2, 2)})


def test_a_reset_voids_earlier_deliveries() -> None:
    forger = Forger()
    forger.reset(0)
    forger.settle(0)  # The delivery is void, so this record has no effect.
    forger.ck(50, 0, 3)
    check_log(forger.world.disk)


def test_a_second_dead_letter_breaks_the_fifteenth_promise() -> None:
    forger = Forger()
    forger.revive(after_ms=1, reason=Reason.FORWARDED_BY_CLIENT)
    forger.copies = 1
    forger.popped[1] = forger.popped[2]
    forger.revive(after_ms=2, reason=Reason.FORWARDED_BY_CLIENT)
    with pytest.raises(BrokenPromise, match="15: a second dead letter"):
        check_log(forger.world.disk)


def test_the_checker_reads_every_kind_of_record() -> None:
    forger = Forger()
    checker = check_log(forger.world.disk)
    assert {RecordKind(kind) for kind in checker.kinds} >= {
        RecordKind.EPOCH_START,
        RecordKind.MESSAGE,
        RecordKind.CK,
        RecordKind.ACK,
        RecordKind.CONFIG,
    }
