"""A restart at any moment changes nothing that a client can see, whatever was in progress.

Background work advances slice by slice among the commands, and several commands share a round.
Therefore the slices of one snapshot are of different moments. The complete state after each start
must equal the state before it, whichever of the derived files survived.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from random import Random
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.disk.observation import lows_of, observe
from tests.support.disk.quiet import has_pending
from tests.support.seeds import examples, seeds
from tests.support.worlds.engine_world import SMALL, World, blob
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic, TopicType
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.store.disk import File
from tidemill.common.errors import GroupNotFound, InvalidReceiptHandle, TopicNotFound
from tidemill.message.client_key import ClientKey

TOPICS = ("orders", "payments")
GROUPS = ("plain", "fifo", "fifo-2", "late")
DERIVED = ("queues", "index", "snapshots")
TOPIC = st.sampled_from(TOPICS)
GROUP = st.sampled_from(GROUPS)
# The broker does not renew the deliveries of the first one.
CLIENTS = (ClientKey("simple"), ClientKey("push-1"), ClientKey("push-1", 7), ClientKey("push-2", 9))
CLIENT = st.sampled_from(CLIENTS)
ENDS_ROUND = st.booleans()
PLACE = st.integers(0, 1 << 30)  # counted from the end of the candidates


class RestartAnywhere(RuleBasedStateMachine):
    """A machine with two topics and four groups: two ordered, one at the latest message."""

    @initialize()
    def begin(self) -> None:
        self.world = World(
            config=SMALL,
            segment_bytes=64 << 10,
            retention_bytes=200 << 10,
            deliveries_max=10_000,
            is_followed=True,
        )
        self.steps: Iterator[list[File]] | None = None
        self.done: Counter[str] = Counter()
        self.work = ""
        self.handles: list[Delivery] = []
        self.sent = 0
        for name in TOPICS:
            self.topic(name)
        for name in GROUPS:
            self.group(name)
        self.commit()

    def topic(self, name: str) -> Topic:
        engine = self.world.engine
        return engine.catalog.find_topic(name) or engine.administration.put_topic(
            name, type_=TopicType.NORMAL, queues=1, now_ms=self.world.now_ms
        )

    def group(self, name: str) -> ConsumerGroup:
        engine = self.world.engine
        return engine.catalog.find_group(name) or engine.administration.put_group(
            name,
            is_ordered=name.startswith("fifo"),
            max_attempts=3,
            start_from_latest=name == "late",
            now_ms=self.world.now_ms,
        )

    def end(self, ends_round: bool) -> None:
        if ends_round:
            self.commit()

    def commit(self) -> None:
        if has_pending(self.world.engine):
            self.world.commit()

    # ------------------------------------------------------------ commands

    @rule(name=TOPIC, count=st.integers(1, 12), size=st.sampled_from([50, 3_000]), ends=ENDS_ROUND)
    def send(self, name: str, count: int, size: int, ends: bool) -> None:
        topic, world = self.topic(name), self.world
        for _ in range(count):
            self.sent += 1
            data = blob(f"m{self.sent}", size=size)
            world.engine.commands.send(
                topic.id,
                QueueId(self.sent % topic.queues),
                data,
                crc32(data),
                now_ms=world.now_ms,
                firing_ms=world.now_ms,
            )
        self.end(ends)

    @rule(
        name=TOPIC,
        group_name=GROUP,
        want=st.integers(1, 10),
        duration=st.sampled_from([1_000, 20_000, 500_000]),
        attempt_id=st.sampled_from(["", "a", "b"]),
        client=CLIENT,
        ends=ENDS_ROUND,
    )
    def pop(
        self,
        name: str,
        group_name: str,
        want: int,
        duration: int,
        attempt_id: str,
        client: ClientKey,
        ends: bool,
    ) -> None:
        group, topic = self.group(group_name), self.topic(name)
        batches = self.world.engine.commands.pop(
            group.id,
            topic.id,
            max_messages=want,
            invisible_duration_ms=duration,
            attempt_id=attempt_id,
            now_ms=self.world.now_ms,
            client=client,
            renews=client.client_id != "simple",
        )
        self.handles += [
            Delivery(
                group.id,
                topic.id,
                one.slot,
                one.delivery_id,
                index,
                one.visible_at_ms,
                client.owner,
            )
            for one in batches
            for index in one.indexes
        ]
        self.end(ends)

    @precondition(lambda self: self.handles)
    @rule(at=PLACE, count=st.integers(1, 6), ends=ENDS_ROUND)
    def ack(self, at: int, count: int, ends: bool) -> None:
        at %= len(self.handles)
        for delivery in self.handles[at : at + count]:
            self.world.engine.commands.ack(delivery, self.world.now_ms)
        self.end(ends)

    @precondition(lambda self: self.handles)
    @rule(
        at=PLACE,
        duration=st.sampled_from([0, 2_000, 300_000]),
        suspend=st.booleans(),
        ends=ENDS_ROUND,
    )
    def change(self, at: int, duration: int, suspend: bool, ends: bool) -> None:
        delivery = self.handles[-1 - at % min(len(self.handles), 20)]
        try:
            changed = self.world.engine.commands.change_invisible(
                delivery, invisible_duration_ms=duration, suspend=suspend, now_ms=self.world.now_ms
            )
            self.handles.append(changed)
        except InvalidReceiptHandle:
            pass
        self.end(ends)

    @precondition(lambda self: self.handles)
    @rule(at=PLACE, ends=ENDS_ROUND)
    def dead_letter(self, at: int, ends: bool) -> None:
        delivery = self.handles[-1 - at % min(len(self.handles), 20)]
        with contextlib.suppress(InvalidReceiptHandle, TopicNotFound, GroupNotFound):
            self.world.engine.commands.dead_letter(delivery, self.world.now_ms)
        self.end(ends)

    @rule(client=CLIENT)
    def live_on(self, client: ClientKey) -> None:
        self.world.alive(client.client_id, owner=client.owner)

    @rule(client=CLIENT)
    def end_client(self, client: ClientKey) -> None:
        self.world.engine.commands.end_clients([client])

    @rule(client=CLIENT, name=st.one_of(st.just(""), TOPIC))
    def revoke(self, client: ClientKey, name: str) -> None:
        self.world.engine.commands.revoke_deliveries(client, group="", topic=name)

    @rule(duration=st.sampled_from([1, 1_500, 25_000, 600_000]))
    def advance(self, duration: int) -> None:
        self.world.now_ms += duration
        self.world.engine.room.measure()

    @rule(ends=ENDS_ROUND)
    def revive(self, ends: bool) -> None:
        self.world.engine.run_due(self.world.now_ms, firing_ms=self.world.now_ms)
        self.end(ends)

    @rule(name=TOPIC, group_name=GROUP, earliest=st.booleans(), ends=ENDS_ROUND)
    def reset(self, name: str, group_name: str, earliest: bool, ends: bool) -> None:
        self.topic(name), self.group(group_name)
        target = ResetTarget(earliest=earliest, latest=not earliest)
        self.world.engine.administration.reset_offset(group_name, name, target, self.world.now_ms)
        self.end(ends)

    @rule(name=TOPIC, ends=ENDS_ROUND)
    def grow(self, name: str, ends: bool) -> None:
        queues = min(self.topic(name).queues + 1, 3)
        self.world.engine.administration.put_topic(
            name, type_=None, queues=queues, now_ms=self.world.now_ms
        )
        self.end(ends)

    @rule(name=TOPIC, ends=ENDS_ROUND)
    def delete_topic(self, name: str, ends: bool) -> None:
        self.topic(name)
        self.world.engine.administration.delete_topic(name, self.world.now_ms)
        self.end(ends)

    @rule(name=GROUP, ends=ENDS_ROUND)
    def delete_group(self, name: str, ends: bool) -> None:
        self.group(name)
        self.world.engine.administration.delete_group(name, self.world.now_ms)
        self.end(ends)

    # ------------------------------------------------------------ background, restart

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        """Advance background work by some slices, or begin due work."""
        for _ in range(count):
            self.commit()
            if self.steps is None:
                engine, now_ms = self.world.engine, self.world.now_ms
                engine.retention.note(now_ms, None)
                look = engine.retention.find_look(now_ms)
                if look is not None:
                    self.work, self.steps = "look", look
                elif retire := engine.retention.find_work(now_ms, engine.timers):
                    self.work, self.steps = "retire", retire
                else:
                    self.work, self.steps = "checkpoint", engine.checkpoints.write()
            files = next(self.steps, None)
            if files is None:
                self.done[self.work] += 1
                self.steps = None
                continue
            for file in files:
                file.sync()

    @rule(
        how=st.sampled_from(["kill", "power cut"]),
        lost=st.sampled_from([(), (), (), ("snapshots",), ("queues",), DERIVED]),
    )
    def restart(self, how: str, lost: tuple[str, ...]) -> None:
        self.commit()
        world = self.world
        before = world.engine
        disk = world.disk.after_kill() if how == "kill" else world.disk.after_power_cut()
        for folder in lost:
            for name in disk.names(folder):
                disk.remove(name)
        world.disk, self.steps = disk, None
        world.open()
        lows = lows_of(before, world.engine)
        seen = observe(world.engine, world.now_ms, lows)
        assert seen == observe(before, world.now_ms, lows, as_started=True)

    @rule()
    def fail_over(self) -> None:
        """Continue with the engine that has only seen the committed bytes of the log."""
        self.commit()
        self.steps = None
        self.world.fail_over()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.restart("kill", ())
            self.restart("kill", DERIVED)


RestartAnywhere.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRestartAnywhere = RestartAnywhere.TestCase


WEIGHTS = {
    "send": 20,
    "pop": 20,
    "ack": 14,
    "change": 8,
    "dead_letter": 2,
    "advance": 8,
    "revive": 10,
    "reset": 1,
    "grow": 1,
    "delete_topic": 1,
    "delete_group": 1,
    "step": 60,
    "restart": 4,
    "fail_over": 1,
    "live_on": 10,
    "end_client": 2,
}


@pytest.mark.parametrize("seed", seeds("long restarts", 20))
def test_a_restart_changes_nothing_in_long_histories(seed: int) -> None:
    """Hypothesis makes short histories; complete checkpoints and retirements need long ones."""
    random = Random(seed)
    machine = RestartAnywhere()
    machine.begin()
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(600):
        name = random.choices(names, weights)[0]
        place = random.randrange(1 << 30)
        topic, group, ends = random.choice(TOPICS), random.choice(GROUPS), random.random() < 0.6
        durations = [0, 1_000, 20_000, 500_000]
        if name in ("ack", "change", "dead_letter") and not machine.handles:
            continue
        match name:
            case "send":
                machine.send(topic, random.randint(1, 12), random.choice([50, 3_000]), ends)
            case "pop":
                want, attempt_id = random.randint(1, 10), random.choice(["", "a", "b"])
                duration, client = random.choice(durations[1:]), random.choice(CLIENTS)
                machine.pop(topic, group, want, duration, attempt_id, client, ends)
            case "live_on" | "end_client":
                getattr(machine, name)(random.choice(CLIENTS))
            case "ack":
                recent = max(len(machine.handles) - 1 - place % 30, 0)
                machine.ack(recent, random.randint(1, 6), ends)
            case "change":
                machine.change(place, random.choice(durations), random.random() < 0.3, ends)
            case "dead_letter":
                machine.dead_letter(place, ends)
            case "advance":
                machine.advance(random.choice([1, 1_500, 25_000, 600_000]))
            case "revive":
                machine.revive(ends)
            case "reset":
                machine.reset(topic, group, random.random() < 0.5, ends)
            case "grow" | "delete_topic":
                getattr(machine, name)(topic, ends)
            case "delete_group":
                machine.delete_group(group, ends)
            case "step":
                machine.step(random.randint(1, 4))
            case "fail_over":
                machine.fail_over()
            case "restart":
                lost = random.choice([(), (), ("snapshots",), ("queues",), DERIVED])
                machine.restart(random.choice(["kill", "power cut"]), lost)
    machine.teardown()
    assert machine.done["checkpoint"] > 2
    assert machine.done["retire"] > 0
