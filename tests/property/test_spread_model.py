"""Spreads of dedup keys over real engines, with old lists, lost answers, kills and failovers (D-5).

The model knows each key of each committed message, and what keeps it. No broker group may store a
key that the cluster knows. `test_spread_exploration.py` tries all orders of few events; here the
engines run, with windows, delayed messages, both modes, and broker groups that join and drain.
Deduplication is turned off and on again. While it is off, the model checks nothing, and broker
groups are removed by force; they join again with their old store. When it is on again, all keys are
free.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.spread_world import HOME, SpreadWorld
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.metadata.dedup_policy import DedupMode, KeyPlacement
from tidemill.common.errors import Conflict, KeyOwnerChanged
from tidemill.message.dedup_key import owner_of_key

STEPS = 400
WINDOW_MS = 2_000
MAX_WAIT_MS = 1_500
KEYS = [f"k{n}" for n in range(5)]
PROXIES = 3
PROOFS_MAX = 6  # the newest ones, which may arrive late
WEIGHTS = {
    "send": 40,
    "hasty send": 10,
    "lookup": 10,
    "late proof": 8,
    "time": 18,
    "spread": 10,
    "list": 16,
    "proxy": 12,
    "report": 16,
    "cancel": 3,
    "disturb": 4,
    "off": 2,
    "remove": 10,
    "on": 10,
}


@dataclass
class Known:
    """The committed message with a key."""

    text: str
    broker: str
    taken_at_ms: int
    timer_id: int | None = None
    due_at_ms: int = 0


class Model:
    """A cluster, the lists of its proxies, and the known keys."""

    def __init__(self, random: Random, mode: DedupMode) -> None:
        self.random = random
        self.mode = mode
        max_wait_ms = MAX_WAIT_MS if mode is DedupMode.REPLACE else None
        self.options: dict[str, Any] = {
            "window_ms": WINDOW_MS,
            "mode": mode,
            "max_wait_ms": max_wait_ms,
        }
        self.cluster = SpreadWorld(**self.options)
        self.keys: dict[str, Known] = {}
        self.lists = [0] * PROXIES  # numbers of snapshots
        self.proofs: list[tuple[str, str, int]] = []  # broker group, key, version
        kinds = ("stored", "repeated", "rejected", "moved", "closed", "on", "not on yet")
        self.counts = dict.fromkeys((*kinds, "removed", "joined again"), 0)

    @property
    def now_ms(self) -> int:
        return self.cluster.home.now_ms

    def find(self, key: str) -> Known | None:
        known = self.keys.get(key)
        if known is None or known.timer_id is not None:
            return known
        if self.now_ms < known.taken_at_ms + WINDOW_MS:
            return known
        del self.keys[key]
        return None

    @property
    def is_on(self) -> bool:
        return self.cluster.topic().dedup is not None

    def choose_list(self) -> KeyPlacement:
        """Return the list of some proxy. Without deduplication, any broker group gets the key."""
        topic = self.cluster.snapshots[self.random.choice(self.lists)][0]
        if topic.dedup is None:
            return KeyPlacement(groups=(self.random.choice(["broker-0", *self.cluster.delivered]),))
        return topic.placement

    def step(self, number: int) -> None:
        random, cluster = self.random, self.cluster
        match random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]:
            case "send":
                self.send(f"m{number}")
            case "hasty send":
                self.send_without_lookup(f"m{number}")
            case "lookup":
                self.look_up()
            case "late proof":
                self.send_late(f"m{number}")
            case "time":
                cluster.advance(random.choice((1, 100, 1_000, WINDOW_MS)))
                self.fire()
            case "spread":
                self.spread()
            case "list":
                last = len(cluster.snapshots) - 1
                for name in random.sample(
                    sorted(cluster.delivered), k=random.randint(0, len(cluster.delivered))
                ):
                    cluster.deliver(name, random.randint(cluster.delivered[name], last))
            case "proxy":
                proxy = random.randrange(PROXIES)
                last = len(cluster.snapshots) - 1
                self.lists[proxy] = random.randint(self.lists[proxy], last)
            case "report":
                was_open = bool(cluster.topic().placement.before)
                for name in cluster.delivered:
                    cluster.report(name)
                self.counts["closed"] += was_open and not cluster.topic().placement.before
            case "cancel":
                self.cancel()
            case "off":
                cluster.home.turn_off()
                cluster.note_snapshot()
                self.keys = {}
            case "remove":
                self.remove()
            case "on":
                self.turn_on()
            case "disturb":
                self.disturb(random.choice(list(cluster.worlds)))

    def remove(self) -> None:
        """Remove a broker group by force while deduplication is off."""
        waited_for = self.cluster.topic().placement.before
        if not self.is_on and waited_for:
            self.cluster.remove(self.random.choice(waited_for))
            self.counts["removed"] += 1

    def is_reachable(self, name: str) -> bool:
        """Whether proxies have a link to a broker group: it is the home or a member."""
        return name == HOME or name in self.cluster.delivered

    def turn_on(self) -> None:
        """Turn deduplication on again, unless a broker group may know older keys."""
        if self.is_on:
            return
        self.cluster.report_levels()
        try:
            self.cluster.home.turn_on(**self.options)
        except Conflict:
            assert self.cluster.topic().placement.before
            self.counts["not on yet"] += 1
            return
        self.cluster.note_snapshot()
        self.counts["on"] += 1

    def spread(self) -> None:
        """Change the active broker groups and spread the keys, unless a spread is open."""
        self.cluster.report_levels()
        if not self.cluster.topic().placement.before:
            self.change_members()
        try:
            self.cluster.spread(is_delivered=False)
        except Conflict:
            topic = self.cluster.topic()
            assert topic.dedup is None or topic.placement.before, "nothing else rejects a spread"

    def change_members(self) -> None:
        """Let a broker group join, or leave the lists; it accepts messages with old lists still."""
        groups = self.cluster.home.engine.broker_groups
        members = self.cluster.home.engine.catalog.membership.groups
        name = self.random.choice(("broker-1", "broker-2"))
        if name not in self.cluster.delivered:
            self.counts["joined again"] += bool(self.cluster.worlds[name].engine.catalog.topics)
            self.cluster.join(name)
        elif members[name].state == "draining":
            groups.add(name, members[name].address, self.now_ms)
        else:
            groups.drain(name, self.now_ms)
        self.cluster.home.commit()

    def send(self, text: str) -> None:
        key = self.random.choice(KEYS)
        placement = self.choose_list()
        owner = owner_of_key(key.encode(), placement.groups)
        old_owner = owner_of_key(key.encode(), placement.before or placement.groups)
        version = 0
        if owner != old_owner:
            if not self.is_reachable(old_owner):
                return
            try:
                found = self.cluster.look_up(old_owner, key, placement)
            except KeyOwnerChanged:
                self.counts["rejected"] += 1
                return
            if found.repeat is not None:
                self.note_repeat(key)
                return
            self.counts["moved"] += 1
            if found.is_replaceable:
                owner = old_owner
            else:
                version = placement.version
        self.store(owner, key, text, version)

    def send_without_lookup(self, text: str) -> None:
        """Send as a proxy that knows no lookups does."""
        key = self.random.choice(KEYS)
        placement = self.choose_list()
        self.store(owner_of_key(key.encode(), placement.groups), key, text, 0)

    def look_up(self) -> None:
        """Look up a key and lose the answer, or keep it for a late send."""
        placement = self.choose_list()
        key = self.random.choice(KEYS)
        owner = owner_of_key(key.encode(), placement.groups)
        old_owner = owner_of_key(key.encode(), placement.before or placement.groups)
        if owner == old_owner or not self.is_reachable(old_owner):
            return
        is_committed = self.random.random() < 0.7
        try:
            found = self.cluster.look_up(old_owner, key, placement, is_committed=is_committed)
        except KeyOwnerChanged:
            return
        finally:
            if not is_committed:
                # A fail over would compare the replica with a fence that is not committed.
                self.cluster.worlds[old_owner].restart(power_cut=self.random.random() < 0.5)
        if is_committed and found.repeat is None and not found.is_replaceable:
            self.proofs.append((owner, key, placement.version))

    def send_late(self, text: str) -> None:
        if self.proofs:
            owner, key, version = self.random.choice(self.proofs[-PROOFS_MAX:])
            # Between the lookup and the send, only this broker group may have taken the key.
            self.store(owner, key, text, version)

    def store(self, owner: str, key: str, text: str, version: int) -> None:
        if not self.is_reachable(owner):
            return
        world, random = self.cluster.worlds[owner], self.random
        is_delayed = random.random() < 0.4
        due_at_ms = self.now_ms + random.randrange(1, 2 * WINDOW_MS) if is_delayed else None
        is_lost = random.random() < 0.15
        try:
            sent = world.store(
                text, key=key, key_version=version, due_at_ms=due_at_ms, is_ended=not is_lost
            )
        except RepeatedSend:
            self.note_repeat(key)
            return
        except KeyOwnerChanged:
            self.counts["rejected"] += 1
            return
        if is_lost:
            world.restart(power_cut=True)
            return
        self.counts["stored"] += 1
        if not self.is_on or self.cluster.topic(owner).dedup is None:
            return
        known = self.find(key)
        timer_id = sent.queue_offset if sent.due_at_ms else None
        if known is not None and known.timer_id is not None and self.mode is DedupMode.REPLACE:
            assert owner == known.broker, f"D-7: {key} waits at {known.broker}"
            assert timer_id in {None, known.timer_id}, "D-7"
            known.text, known.timer_id, known.due_at_ms = text, known.timer_id, sent.due_at_ms
            return
        assert known is None, f"D-5: {key} is known at {known and known.broker}, not {owner}"
        self.keys[key] = Known(text, owner, self.now_ms, timer_id, sent.due_at_ms)

    def note_repeat(self, key: str) -> None:
        self.counts["repeated"] += 1
        assert not self.is_on or self.find(key) is not None, f"D-4: {key} is free"

    def fire(self) -> None:
        """The timers that are due have fired, since all due work was done."""
        for key, known in list(self.keys.items()):
            if known.timer_id is not None and known.due_at_ms <= self.now_ms:
                known.timer_id = None
                if self.mode is DedupMode.REPLACE:
                    del self.keys[key]

    def cancel(self) -> None:
        for key, known in list(self.keys.items()):
            if known.timer_id is not None:
                self.cluster.worlds[known.broker].cancel(known.timer_id)
                del self.keys[key]
                return

    def disturb(self, name: str) -> None:
        world = self.cluster.worlds[name]
        match self.random.choice(("kill", "power cut", "fail over")):
            case "kill":
                world.restart()
            case "power cut":
                world.restart(power_cut=True)
            case "fail over":
                world.fail_over()


def run(seed: int, mode: DedupMode) -> Model:
    model = Model(Random(seed), mode)
    for number in range(STEPS):
        model.step(number)
    return model


@pytest.mark.parametrize("mode", list(DedupMode))
@pytest.mark.parametrize("seed", seeds("spread model", 12))
def test_a_cluster_stores_each_key_once_through_spreads(seed: int, mode: DedupMode) -> None:
    """D-5, and D-4 and D-7 with several broker groups."""
    run(seed, mode)


def test_the_model_sees_all_kinds_of_answers() -> None:
    counts = [run(seed, DedupMode.FIRST).counts for seed in range(6)]
    assert all(sum(each[kind] for each in counts) > 0 for kind in counts[0]), counts
