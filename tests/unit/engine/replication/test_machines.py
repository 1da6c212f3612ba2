"""Master and replica, event by event, with logs in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from tidemill.broker.engine.replication.actions import (
    Action,
    DivergenceAlarm,
    MastershipRelease,
    Promotion,
    SetProposal,
    StepDown,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import (
    CommonPrefix,
    EpochEntry,
    Journal,
    LogExtent,
)
from tidemill.broker.engine.replication.messages import (
    Ack,
    Data,
    Digest,
    ForwardedView,
    Hello,
    MasterHeartbeat,
    Refusal,
    Welcome,
)
from tidemill.broker.engine.replication.replication import Replication
from tidemill.broker.engine.replication.sync_state import SyncState
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView


def run(replica_id: int, number: int = 0) -> ReplicaRun:
    return ReplicaRun(ReplicaId(replica_id), f"{replica_id}.{number}")


def view(
    epoch: int = 1, version: int = 1, *, master: int = 0, sss: tuple[int, ...] = (0, 1, 2)
) -> ReplicationView:
    return ReplicationView(
        epoch=epoch,
        version=version,
        master=run(master),
        sss=frozenset(map(run, sss)),
        eligible=frozenset(),
        min_in_sync=2,
        addresses=((ReplicaId(0), "host-0:1"),),
    )


class Log:
    """A log in memory. The test sets its durable offset; an epoch begins with one byte."""

    def __init__(self, data: bytes = b"", journal: Journal = ()) -> None:
        self.data = data
        self.durable_offset = len(data)
        self.confirm_offset = 0
        self.epoch_seen = journal[-1].epoch if journal else 0
        self.journal = journal
        self.log_min = 0
        self.floors: list[tuple[int, int]] = []
        self.capacity = 1 << 40
        self.applied: int | None = None  # None: the whole log
        self.emptied = 0  # times that the log was emptied

    @property
    def applied_offset(self) -> int:
        return self.log_end if self.applied is None else self.applied

    @property
    def state_floor(self) -> int:
        return self.log_min

    @property
    def log_end(self) -> int:
        return len(self.data)

    def save_epoch_seen(self, epoch: int) -> None:
        self.epoch_seen = epoch

    def save_journal(self, journal: Journal) -> None:
        self.journal = journal

    def begin_epoch(self, epoch: int) -> int:
        self.data += bytes([epoch])
        return self.log_end

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        data = self.data[offset : offset + size_max]
        return Data(0, offset, data, crc32(data), 0, 0, 1 << 20) if data else None

    def can_begin(self, offset: int) -> bool:
        return offset >= self.log_min

    def has_room_for(self, size: int) -> bool:
        return len(self.data) + size <= self.capacity

    def append(self, frame: Data) -> None:
        self.data += frame.data

    def digest(self, begin: int, end: int) -> Digest:
        return Digest(begin, end, crc32(self.data[begin:end]))

    def truncate(self, cut: int) -> None:
        self.data = self.data[:cut]
        self.durable_offset = min(self.durable_offset, cut)

    def start_at(self, log_min: int) -> None:
        self.data, self.log_min, self.durable_offset = b"", log_min, log_min
        self.emptied += 1

    def follow_state_floor(self, state_floor: int, stated_before: int) -> None:
        self.floors.append((state_floor, stated_before))

    def confirm(self, offset: int) -> None:
        self.confirm_offset = offset


class Pair:
    """A master (replica 0) and a replica that follows it, with one stream between them."""

    def __init__(self, mode: AckMode = AckMode.SYNC_FSYNC, **logs: Log) -> None:
        config = ReplicationConfig(ack_mode=mode)
        self.logs = [logs.get("master", Log()), logs.get("replica", Log())]
        self.master, self.replica = (
            Replication(run(n), group="g", store_uuid=f"store {n}", log=self.logs[n], config=config)
            for n in (0, 1)
        )
        self.now_ms = 1_000
        self.left: list[Action] = []  # actions for neither of them

    def go(self) -> None:
        """Carry out the actions of both until there are none."""
        while actions := [
            (source, action)
            for source in (self.master, self.replica)
            for action in source.take_actions()
        ]:
            for source, action in actions:
                self._do(source, action)

    def _do(self, source: Replication, action: Action) -> None:
        now_ms = self.now_ms
        match action:
            case StreamDial():
                self.replica.handle_connected(1, now_ms)
            case StreamSend(1, Hello() as hello):
                self.master.handle_hello(1, hello, now_ms)
            case StreamSend(1, Ack() as ack):
                self.master.handle_ack(1, ack, now_ms)
            case StreamSend(1, message) if source is self.master:
                assert not isinstance(message, Hello | Ack)
                self.replica.handle_message(1, message, now_ms)
            case StreamClose(1):
                (self.replica if source is self.master else self.master).handle_closed(1, now_ms)
                self.left.append(action)
            case _:
                self.left.append(action)

    def sync(self, which: int) -> None:
        self.logs[which].durable_offset = self.logs[which].log_end
        (self.master if which == 0 else self.replica).handle_progress(self.now_ms)
        self.go()

    def learn(self, news: ReplicationView) -> None:
        for one in (self.master, self.replica):
            one.learn(news, self.now_ms)
        self.go()


def test_nothing_is_confirmed_before_every_member_has_it_on_its_disk() -> None:
    pair = Pair()
    pair.learn(view(sss=(0, 1)))
    assert any(isinstance(action, Promotion) for action in pair.left)
    pair.sync(0)
    assert pair.logs[1].data == pair.logs[0].data == b"\x01"
    assert pair.logs[0].confirm_offset == 0
    pair.sync(1)
    assert pair.logs[0].confirm_offset == 1


def test_in_memory_mode_received_records_count() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    assert pair.logs[0].confirm_offset == 1
    assert pair.logs[1].durable_offset == 0


def test_too_few_members_confirm_nothing() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,)))
    assert pair.logs[0].confirm_offset == 0
    assert pair.master.master is not None
    assert pair.master.master.sync_state.is_short


def test_a_learner_that_has_caught_up_is_proposed_and_must_ack() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,)))
    pair.now_ms += 50
    pair.master.tick(pair.now_ms)
    pair.go()
    (proposal,) = (one.proposal for one in pair.left if isinstance(one, SetProposal))
    assert proposal.sss == {run(0), run(1)}
    assert proposal.version == 1
    assert pair.logs[0].confirm_offset == 0
    pair.learn(view(version=2, sss=(0, 1)))
    assert pair.logs[0].confirm_offset == 1


def test_a_retired_replica_follows_and_is_not_proposed() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    retired = frozenset({ReplicaId(1)})
    pair.learn(view(sss=(0,))._replace(retired=retired, min_in_sync=1))
    pair.now_ms += 50
    pair.master.tick(pair.now_ms)
    pair.go()
    assert pair.logs[1].data == pair.logs[0].data
    assert not [one for one in pair.left if isinstance(one, SetProposal)]
    pair.learn(view(version=2, sss=(0,))._replace(min_in_sync=1))
    pair.now_ms += 50
    pair.master.tick(pair.now_ms)
    pair.go()
    (proposal,) = (one.proposal for one in pair.left if isinstance(one, SetProposal))
    assert proposal.sss == {run(0), run(1)}


def test_a_member_with_a_slow_disk_is_proposed_away_if_enough_remain() -> None:
    def proposed(sss: tuple[int, ...], *, is_slow: bool) -> list[frozenset[ReplicaRun]]:
        pair = Pair(AckMode.SYNC_MEMORY)
        pair.learn(view(sss=sss)._replace(min_in_sync=2))
        pair.left.clear()
        for stream, member in ((1, run(1)), (7, run(2))):
            if stream == 7:
                # Replica 2 is only a stream: it acks everything it gets.
                hello = Hello("g", member, "store 2", 1, 1, LogExtent((), 0, 0), 0)
                pair.master.handle_hello(stream, hello, pair.now_ms)
            end = pair.logs[0].log_end
            slow = is_slow and stream == 1
            pair.master.handle_ack(stream, Ack(1, member, end, end, 0, slow), pair.now_ms)
        pair.replica.is_disk_slow = is_slow
        pair.now_ms += 50
        pair.replica.tick(pair.now_ms)
        pair.master.tick(pair.now_ms)
        pair.go()
        return [one.proposal.sss for one in pair.left if isinstance(one, SetProposal)]

    assert proposed((0, 1, 2), is_slow=True) == [frozenset({run(0), run(2)})]
    assert proposed((0, 1, 2), is_slow=False) == []
    # Without it nothing can be confirmed, so it stays until the third replica joins.
    assert proposed((0, 1), is_slow=True) == [frozenset({run(0), run(2)})]
    # A slow replica does not join while there are enough members.
    assert proposed((0, 2), is_slow=True) == []


def test_a_disconnected_member_is_proposed_away_and_stays_in_force_after_a_rejection() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    master = pair.master.master
    assert master is not None
    pair.master.handle_closed(1, pair.now_ms)
    pair.now_ms += 301
    pair.master.tick(pair.now_ms)
    (proposal,) = (a.proposal for a in pair.master.take_actions() if isinstance(a, SetProposal))
    assert proposal.sss == {run(0)}
    pair.logs[0].data += b"x"
    pair.master.handle_progress(pair.now_ms)
    assert pair.logs[0].confirm_offset == 1
    pair.master.handle_rejection(1, pair.now_ms)
    assert master.sync_state.commitment.proposed == {run(0)}


def test_ended_runs_are_forgotten() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    master = pair.master.master
    assert master is not None
    for number in range(50):
        extent = LogExtent((), 0, 0)
        hello = Hello("g", run(2, number), "s", 1, 1, extent, 0)
        master.handle_hello(100 + number, hello, pair.now_ms)
        master.handle_ack(100 + number, Ack(1, run(2, number), 1, 1, 0), pair.now_ms)
    assert len(master.sync_state.peers) == 2
    assert len(master.sync_state.commitment.acked) == 3


def test_a_replaced_run_acks_no_more() -> None:
    """A late ack of a run must not count for the next run, which may have lost the records."""
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    master, extent = pair.master.master, LogExtent((), 0, 0)
    assert master is not None
    for stream, number in ((100, 0), (101, 1)):
        pair.now_ms += 1_001  # The previous run is silent.
        master.handle_hello(stream, Hello("g", run(2, number), "s", 1, 1, extent, 0), pair.now_ms)
    before = master.sync_state.commitment
    master.handle_ack(100, Ack(1, run(2, 0), 1, 1, 0), pair.now_ms)
    assert master.sync_state.commitment == before
    master.handle_ack(101, Ack(1, run(2, 1), 1, 1, 0), pair.now_ms)
    assert master.sync_state.acked(run(2, 1)) == 1


def test_another_run_does_not_replace_a_member_that_is_alive() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    hello = Hello("g", run(1, 7), "a copy", 1, 1, LogExtent((), 0, 0), 0)
    pair.master.handle_hello(9, hello, pair.now_ms)
    actions = pair.master.take_actions()
    assert [a.stream for a in actions if isinstance(a, StreamClose)] == [9]
    pair.logs[0].data += b"x"
    pair.sync(0)
    assert pair.logs[1].data == pair.logs[0].data
    # Its process ended silently: the next Hello is from its next run.
    pair.now_ms += 1_001
    pair.master.handle_hello(10, hello, pair.now_ms)
    actions = pair.master.take_actions()
    assert [a.stream for a in actions if isinstance(a, StreamClose)] == [1]
    assert any(isinstance(a, StreamSend) and isinstance(a.message, Welcome) for a in actions)


def test_a_replica_cuts_records_that_its_master_does_not_have() -> None:
    pair = _parted()
    pair.learn(view(3, 5, sss=(0, 1)))
    assert pair.logs[1].data == pair.logs[0].data == b"\x01aa\x03"
    assert [entry.epoch for entry in pair.logs[1].journal] == [1, 3]


def _parted() -> Pair:
    first, second = EpochEntry(1, 0), EpochEntry(2, 5)
    return Pair(master=Log(b"\x01aa", (first,)), replica=Log(b"\x01aabb\x02c", (first, second)))


def test_confirmed_records_are_never_cut() -> None:
    pair = _parted()
    pair.logs[1].confirm_offset = 4
    pair.learn(view(3, 5, sss=(0, 1)))
    assert any(isinstance(action, DivergenceAlarm) for action in pair.left)
    assert pair.logs[1].data == b"\x01aabb\x02c"
    assert pair.replica.diverged_replicas == {1}
    assert not pair.master.diverged_replicas


def test_a_copy_of_a_log_from_before_epochs_continues_where_it_broke() -> None:
    """A broker that was alone gets replicas: its whole log belongs to the founding epoch."""
    master, replica = Log(b"abcdef"), Log()
    pair = Pair(master=master, replica=replica)
    pair.learn(view(sss=(0,)))
    assert replica.data == master.data == b"abcdef\x01"
    # The replica is killed in the middle of its copy. It is a new run afterwards.
    replica.data, replica.durable_offset = b"abc", 3
    emptied = replica.emptied
    pair.replica = Replication(
        run(1, 1), group="g", store_uuid="store 1", log=replica, config=ReplicationConfig()
    )
    pair.master.handle_closed(1, pair.now_ms)
    pair.replica.learn(view(sss=(0,)), pair.now_ms)
    pair.replica.tick(pair.now_ms)
    pair.go()
    assert replica.data == master.data
    assert replica.emptied == emptied


def test_the_log_of_another_broker_that_was_alone_is_not_deleted() -> None:
    """It has messages and no epoch of a group: its broker was started in a wrong group."""
    for lone in (Log(b"abcdef"), Log(b"abc")):
        pair, data = Pair(master=Log(b"abc"), replica=lone), lone.data
        pair.learn(view(sss=(0,)))
        (alarm,) = (one for one in pair.left if isinstance(one, DivergenceAlarm))
        assert "move the data directory away" in alarm.why
        assert pair.replica.diverged_replicas == {1}
        # A newer view does not change that, and a start of the process finds it again.
        pair.learn(view(version=2, sss=(0,)))
        pair.replica.tick(pair.now_ms + 60_000)
        assert not [one for one in pair.replica.take_actions() if isinstance(one, StreamDial)]
        pair.replica = Replication(
            run(1, 1), group="g", store_uuid="store 1", log=lone, config=ReplicationConfig()
        )
        pair.replica.learn(view(sss=(0,)), pair.now_ms)
        pair.go()
        assert pair.replica.diverged_replicas == {1}
        assert (lone.data, lone.emptied, lone.journal) == (data, 0, ())


def test_another_run_does_not_replace_a_copying_replica_that_is_alive() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,)))
    hello = Hello("g", run(1, 7), "a copy", 1, 1, LogExtent((), 0, 0), 0)
    pair.master.handle_hello(9, hello, pair.now_ms)
    actions = pair.master.take_actions()
    assert [a.stream for a in actions if isinstance(a, StreamClose)] == [9]
    # The same run opens another stream after its own has ended.
    again = hello._replace(member=run(1))
    pair.master.handle_hello(10, again, pair.now_ms)
    actions = pair.master.take_actions()
    assert [a.stream for a in actions if isinstance(a, StreamClose)] == [1]


def test_a_master_refuses_a_replica_below_the_feature_level() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,))._replace(version=9, feature_level=2))
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent((), 0, 0), 0, feature_level=1)
    pair.master.handle_hello(9, hello, pair.now_ms)
    refusals = [a.message for a in pair.master.take_actions() if isinstance(a, StreamSend)]
    assert refusals == [Refusal("feature level 1; the broker group needs 2", pair.master.view)]
    pair.master.handle_hello(10, hello._replace(feature_level=2), pair.now_ms)
    sent = [a.message for a in pair.master.take_actions() if isinstance(a, StreamSend)]
    assert isinstance(sent[0], Welcome)


def test_a_master_ends_the_stream_of_a_replica_when_the_level_rises_above_it() -> None:
    """The level does not wait for a retired replica that was away and comes back."""
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,)))
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent((), 0, 0), 0, feature_level=1)
    pair.master.handle_hello(9, hello, pair.now_ms)
    pair.master.take_actions()
    pair.master.learn(view(sss=(0,))._replace(version=9, feature_level=2), pair.now_ms)
    closed = [a for a in pair.master.take_actions() if isinstance(a, StreamClose)]
    assert [(one.stream, one.why) for one in closed] == [
        (9, "the broker group needs feature level 2")
    ]


def test_a_master_reports_a_replica_without_a_common_epoch() -> None:
    first, second = EpochEntry(1, 0), EpochEntry(2, 0)
    pair = Pair(master=Log(b"\x01aa", (first,)), replica=Log(b"\x02bb", (second,)))
    pair.learn(view(3, 5, sss=(0, 1)))
    assert pair.logs[1].data == b"\x02bb"
    assert pair.master.diverged_replicas == {1}


def test_after_an_unclean_election_confirmed_records_are_cut() -> None:
    pair = _parted()
    pair.logs[1].confirm_offset = 4
    pair.learn(view(3, 5, sss=(0, 1))._replace(unclean_since=3))
    assert pair.logs[1].data == b"\x01aa\x03"


def test_different_bytes_before_the_cut_stop_a_member() -> None:
    pair = _parted()
    pair.logs[1].data = b"\x01xabb\x02c"
    pair.learn(view(3, 5, sss=(0, 1)))
    assert any(isinstance(action, DivergenceAlarm) for action in pair.left)
    learner = _parted()
    learner.logs[1].data = b"\x01xabb\x02c"
    learner.learn(view(3, 5, sss=(0,)))
    assert learner.logs[1].data == b""


def test_a_master_that_meets_a_later_epoch_steps_down_for_good() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    hello = Hello("g", run(1), "s", 2, 4, LogExtent((), 0, 0), 0)
    pair.master.handle_hello(9, hello, pair.now_ms)
    actions = pair.master.take_actions()
    assert any(isinstance(action, StepDown) for action in actions)
    assert any(isinstance(a, StreamSend) and isinstance(a.message, Refusal) for a in actions)
    again = Replication(
        run(0), group="g", store_uuid="store 0", log=pair.logs[0], config=ReplicationConfig()
    )
    again.learn(view(version=2, sss=(0, 1)), pair.now_ms)
    assert again.master is None
    assert pair.logs[0].epoch_seen == 2


def test_a_view_with_another_run_as_master_does_not_promote_this_run() -> None:
    other = Replication(run(0, 1), group="g", store_uuid="s", log=Log(), config=ReplicationConfig())
    other.learn(view(), 1_000)
    assert other.master is None
    assert not other.take_actions()


def test_a_view_with_an_epoch_below_the_seen_one_is_ignored() -> None:
    log = Log()
    log.epoch_seen = 7
    one = Replication(run(0), group="g", store_uuid="s", log=log, config=ReplicationConfig())
    one.learn(view(6, 90), 1_000)
    assert one.view is None


@pytest.mark.parametrize(
    "change",
    [{"epoch": 9}, {"received_end": 99, "durable_end": 99}, {"durable_end": 2}, {"member": run(2)}],
    ids=["another epoch", "behind the end", "more durable than received", "another one"],
)
def test_an_invalid_ack_ends_its_stream(change: dict[str, int]) -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    ack = Ack(1, run(1), 1, 1, 0)._replace(**change)  # type: ignore[arg-type]
    pair.master.handle_ack(1, ack, pair.now_ms)
    assert any(isinstance(action, StreamClose) for action in pair.master.take_actions())


def test_a_frame_at_another_offset_ends_the_stream() -> None:
    changes: list[dict[str, Any]] = [{"epoch": 2}, {"offset": 5}, {"crc": 1}]
    for change in changes:
        pair = Pair(AckMode.SYNC_MEMORY)
        pair.learn(view(sss=(0, 1)))
        frame = Data(1, 1, b"x", crc32(b"x"), 0, 0, 1 << 20)._replace(**change)
        pair.replica.handle_message(1, frame, pair.now_ms)
        assert any(isinstance(action, StreamClose) for action in pair.replica.take_actions())
        assert pair.logs[1].data == b"\x01"


def test_silence_ends_a_stream_on_both_sides_and_the_replica_dials_again_later() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    late_ms = pair.now_ms + 1_001
    for one in (pair.master, pair.replica):
        one.tick(late_ms)
        assert any(isinstance(action, StreamClose) for action in one.take_actions())
    pair.replica.tick(late_ms + 49)
    assert not pair.replica.take_actions()
    pair.replica.tick(late_ms + 50)
    assert any(isinstance(action, StreamDial) for action in pair.replica.take_actions())


FRAME = Data(1, 1, b"x", crc32(b"x"), 0, 0, 1 << 20)


def test_a_large_frame_on_a_slow_link_is_no_silence() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    for _ in range(5):
        pair.now_ms += 900
        pair.replica.handle_part(pair.now_ms)
        pair.replica.tick(pair.now_ms)
    pair.replica.handle_message(1, FRAME, pair.now_ms)
    assert pair.logs[1].data == b"\x01x"


@pytest.mark.parametrize(
    "waited",
    [
        pytest.param(lambda pair: pair.replica.handle_part(pair.now_ms), id="part"),
        pytest.param(
            lambda pair: pair.replica.handle_message(1, MasterHeartbeat(1, 0), pair.now_ms),
            id="heartbeat",
        ),
    ],
)
def test_input_from_before_a_pause_does_not_let_a_frame_from_before_it_pass(
    waited: Callable[[Pair], None],
) -> None:
    """Another replica may have become master during the pause."""
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    pair.replica.take_actions()
    pair.now_ms += 1_001
    waited(pair)
    pair.replica.handle_message(1, FRAME, pair.now_ms)
    assert pair.logs[1].data == b"\x01"
    assert any(isinstance(action, StreamClose) for action in pair.replica.take_actions())


def acked_pair() -> Pair:
    """Return a pair whose replica has acked a record that the master does not have on its disk."""
    pair = Pair()
    pair.learn(view(sss=(0, 1)))
    pair.sync(0)
    pair.sync(1)
    pair.logs[0].data += b"x"
    pair.master.handle_progress(pair.now_ms)
    pair.go()
    pair.sync(1)
    assert pair.logs[0].confirm_offset == 1
    return pair


def test_an_ack_from_before_a_pause_confirms_nothing_if_its_stream_ended_before_it() -> None:
    pair = acked_pair()
    pair.master.handle_closed(1, pair.now_ms)
    pair.now_ms += 1_001
    pair.sync(0)
    assert pair.logs[0].confirm_offset == 1


def test_an_ack_from_before_a_pause_confirms_nothing_if_the_end_of_its_stream_is_read_first() -> (
    None
):
    pair = acked_pair()
    pair.now_ms += 1_001
    pair.master.handle_closed(1, pair.now_ms)
    pair.sync(0)
    assert pair.logs[0].confirm_offset == 1


def test_an_ack_from_before_a_pause_confirms_nothing_if_a_new_hello_is_read_first() -> None:
    pair = acked_pair()
    pair.now_ms += 1_001
    log = pair.logs[1]
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent(log.journal, 0, log.log_end), log.log_end)
    pair.master.handle_hello(2, hello, pair.now_ms)
    pair.sync(0)
    assert pair.logs[0].confirm_offset == 1
    # The replica has seen no later epoch: it follows, and its next ack counts in the end.
    pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
    assert pair.logs[0].confirm_offset == 1
    assert accept_proposal(pair).sss == {run(0), run(1)}
    assert pair.logs[0].confirm_offset == 2


def test_an_ack_from_before_a_pause_confirms_nothing_if_a_view_is_learned_first() -> None:
    """The view removes a member without an ack. The other member may follow a new master."""
    pair = Pair()
    pair.learn(view(sss=(0, 1, 2)))
    pair.sync(0)
    pair.sync(1)
    assert pair.logs[0].confirm_offset == 0, "replica 2 has not acked"
    pair.now_ms += 1_001
    pair.master.learn(view(version=2, sss=(0, 1)), pair.now_ms)
    assert pair.logs[0].confirm_offset == 0
    log = pair.logs[1]
    hello = Hello("g", run(1), "store 1", 1, 2, LogExtent(log.journal, 0, log.log_end), log.log_end)
    pair.master.handle_hello(2, hello, pair.now_ms)
    assert pair.logs[0].confirm_offset == 0
    pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
    accept_proposal(pair)
    assert pair.logs[0].confirm_offset == 1


def accept_proposal(pair: Pair) -> Proposal:
    """Let the controllers accept the next proposal of the master."""
    pair.master.tick(pair.now_ms)
    (proposal,) = (a.proposal for a in pair.master.take_actions() if isinstance(a, SetProposal))
    pair.master.handle_acceptance(proposal.version, pair.now_ms)
    return proposal


def test_a_master_that_stood_still_confirms_nothing_until_the_controllers_accept_a_proposal() -> (
    None
):
    """Its replica stood still, too, and does not know that an operator has replaced both."""
    pair = acked_pair()
    pair.now_ms += 301
    pair.master.handle_closed(1, pair.now_ms)
    pair.now_ms += 301
    pair.master.tick(pair.now_ms)
    assert any(isinstance(action, SetProposal) for action in pair.master.take_actions())
    pair.now_ms += 1_001
    log = pair.logs[1]
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent(log.journal, 0, log.log_end), log.log_end)
    pair.master.handle_hello(2, hello, pair.now_ms)
    pair.sync(0)
    pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
    pair.master.handle_acceptance(1, pair.now_ms)
    assert pair.logs[0].confirm_offset == 1, "the proposal was sent before the standstill"
    pair.master.handle_rejection(1, pair.now_ms)
    assert pair.logs[0].confirm_offset == 1
    pair.now_ms += 101
    accept_proposal(pair)
    assert pair.logs[0].confirm_offset == 2
    pair.now_ms += 800
    pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
    pair.logs[0].data += b"y"
    end = pair.logs[0].durable_offset = pair.logs[0].log_end
    pair.master.handle_progress(pair.now_ms)
    pair.master.handle_ack(2, Ack(1, run(1), end, end, 0), pair.now_ms)
    assert pair.logs[0].confirm_offset == end, "it was awake since"


def test_a_master_in_doubt_proposes_the_recorded_set() -> None:
    """The controllers refuse a replica that would join while they cannot reach it.

    If each proposal contained it, one standstill would end all sends for that time.
    """
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,))._replace(min_in_sync=1))
    pair.now_ms += 1_001
    log = pair.logs[1]
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent(log.journal, 0, log.log_end), log.log_end)
    pair.master.handle_hello(2, hello, pair.now_ms)
    pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
    assert accept_proposal(pair).sss == {run(0)}
    pair.now_ms += 50
    assert accept_proposal(pair).sss == {run(0), run(1)}, "without doubt"


def test_slow_controllers_end_the_doubt_of_a_master() -> None:
    """Only the answer to its last proposal counts, and the new view comes before the answer."""
    pair = acked_pair()
    pair.now_ms += 1_001
    begin_ms = pair.now_ms
    log = pair.logs[1]
    hello = Hello("g", run(1), "store 1", 1, 1, LogExtent(log.journal, 0, log.log_end), log.log_end)
    pair.master.handle_hello(2, hello, pair.now_ms)
    proposed: list[int] = []
    while len(proposed) < 5:
        pair.master.handle_ack(2, Ack(1, run(1), log.log_end, log.log_end, 0), pair.now_ms)
        pair.master.tick(pair.now_ms)
        if any(isinstance(action, SetProposal) for action in pair.master.take_actions()):
            proposed.append(pair.now_ms - begin_ms)
            # The result of an earlier proposal.
            pair.master.learn(view(version=1 + len(proposed), sss=(0, 1)), pair.now_ms)
        pair.now_ms += 50
    assert proposed == [0, 500, 1_500, 3_500, 5_500]


def proposals_in_doubt(state: SyncState, begin_ms: int, end_ms: int) -> list[Proposal]:
    """Let a doubt begin and time pass; return the proposals, each with its time as version."""
    state.doubt(begin_ms)
    found = []
    for now_ms in range(begin_ms, end_ms, 10):
        proposal = state.tick(10, now_ms)
        if proposal is not None:
            found.append(proposal._replace(version=now_ms - begin_ms))
    return found


def test_a_second_doubt_waits_as_short_as_the_first_one() -> None:
    """Controllers that were slow during the first one may be fast again."""
    recorded = view(sss=(0, 1))
    state = SyncState(run(0), recorded, ReplicationConfig(), epoch_start_end=1, confirm=1, now_ms=0)
    for begin_ms in (0, 10_000):
        found = proposals_in_doubt(state, begin_ms, begin_ms + 2_000)
        assert [one.version for one in found] == [0, 500, 1_500]
        state.handle_acceptance(recorded.version)
        assert not state.is_doubtful


def test_an_ack_confirms_although_its_stream_has_just_ended() -> None:
    pair = acked_pair()
    pair.master.handle_closed(1, pair.now_ms)
    pair.now_ms += 999
    pair.sync(0)
    assert pair.logs[0].confirm_offset == 2


def test_a_welcome_from_before_a_pause_is_not_followed() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.replica.learn(view(sss=(0, 1)), pair.now_ms)
    pair.replica.take_actions()
    pair.replica.handle_connected(1, pair.now_ms)
    extent = LogExtent((EpochEntry(1, 0),), 0, 1)
    welcome = Welcome(1, run(0), CommonPrefix(0), Digest(0, 0, 0), extent, 0)
    pair.replica.handle_message(1, welcome, pair.now_ms + 1_001)
    pair.replica.handle_message(1, FRAME._replace(offset=0), pair.now_ms + 1_001)
    assert pair.logs[1].data == b""
    assert any(isinstance(action, StreamClose) for action in pair.replica.take_actions())


def test_an_idle_stream_carries_heartbeats_both_ways() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    for one, kind in ((pair.master, MasterHeartbeat), (pair.replica, Ack)):
        one.tick(pair.now_ms + 200)
        assert any(
            isinstance(action, StreamSend) and isinstance(action.message, kind)
            for action in one.take_actions()
        )


def test_a_transfer_waits_for_its_target_and_sends_it_the_view_at_once() -> None:
    pair = Pair()
    pair.learn(view(sss=(0, 1)))
    pair.sync(0)
    assert pair.master.hand_over(None, pair.now_ms)
    assert pair.master.master is not None
    assert not pair.master.master.accepts_sends
    pair.go()
    assert not any(isinstance(action, MastershipRelease) for action in pair.left)
    pair.sync(1)
    (release,) = (action for action in pair.left if isinstance(action, MastershipRelease))
    assert (release.epoch, release.master, release.target) == (1, run(0), 1)
    pair.master.learn(view(2, 2, master=1, sss=(0, 1)), pair.now_ms)
    news = [a for a in pair.master.take_actions() if isinstance(a, StreamSend)]
    assert [type(one.message) for one in news] == [ForwardedView]
    pair.replica.handle_message(1, ForwardedView(view(2, 2, master=1, sss=(0, 1))), pair.now_ms)
    assert pair.replica.master is not None
    assert pair.logs[1].data == b"\x01\x02"


def test_a_transfer_that_takes_too_long_is_cancelled() -> None:
    pair = Pair()
    pair.learn(view(sss=(0, 1)))
    pair.sync(0)
    assert pair.master.hand_over(ReplicaId(1), pair.now_ms)
    pair.master.tick(pair.now_ms + 2_000)
    assert pair.master.master is not None
    assert pair.master.master.accepts_sends
    assert not pair.master.hand_over(ReplicaId(2), pair.now_ms)


def test_the_bytes_without_an_ack_are_limited() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    pair.logs[0].data += bytes(40 << 20)
    pair.master.handle_progress(pair.now_ms)
    sent = sum(
        len(action.message.data)
        for action in pair.master.take_actions()
        if isinstance(action, StreamSend) and isinstance(action.message, Data)
    )
    assert sent == 16 << 20


def test_the_bytes_that_a_replica_has_not_applied_are_limited() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.logs[1].applied = 0
    pair.learn(view(sss=(0, 1)))
    for _ in range(4):
        pair.logs[0].data += bytes(10 << 20)
        pair.master.handle_progress(pair.now_ms)
        pair.go()
    assert pair.logs[1].log_end == pytest.approx(16 << 20, abs=1 << 20)
    pair.logs[1].applied = 10 << 20
    pair.replica.handle_progress(pair.now_ms)
    pair.go()
    assert pair.logs[1].log_end == pytest.approx(26 << 20, abs=1 << 20)


def elected_with_more_to_apply() -> tuple[Pair, ReplicationView]:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0, 1)))
    pair.logs[0].data += bytes(4 << 20)
    pair.master.handle_progress(pair.now_ms)
    pair.go()
    log = pair.logs[1]
    log.confirm_offset = log.durable_offset = log.log_end
    log.applied = log.log_end - (2 << 20)
    return pair, view(2, 2, master=1, sss=(0, 1))


def test_an_elected_replica_first_applies_confirmed_records() -> None:
    pair, elected = elected_with_more_to_apply()
    pair.replica.learn(elected, pair.now_ms)
    assert pair.replica.master is None
    assert pair.logs[1].epoch_seen == 1, "as if the view had not arrived"
    pair.logs[1].applied = None
    pair.replica.tick(pair.now_ms + 50)
    assert pair.replica.master is not None


def test_an_elected_replica_postpones_its_promotion_for_a_limited_time() -> None:
    pair, elected = elected_with_more_to_apply()
    for later_ms in (0, 50, 450):
        pair.replica.learn(elected, pair.now_ms + later_ms)
        assert pair.replica.master is None
    pair.replica.tick(pair.now_ms + 500)
    assert pair.replica.master is not None


def test_a_welcome_of_an_ended_epoch_is_ignored() -> None:
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(3, 3, sss=(0, 1)))
    extent = LogExtent((), 0, 0)
    old = Welcome(2, run(2), CommonPrefix(0), pair.logs[1].digest(0, 0), extent, 0)
    pair.replica.handle_message(1, old, pair.now_ms)
    assert any(isinstance(action, StreamClose) for action in pair.replica.take_actions())
    assert pair.logs[1].data == b"\x03"
