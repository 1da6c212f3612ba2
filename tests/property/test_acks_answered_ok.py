"""A message whose ack was answered OK is never delivered again, whatever happened before.

Random lives of one group, FIFO or not: push consumers that end, lose their connection, repeat their
attempts and ack late, changed durations, starts and failovers, starts with a clock that was set
back or ahead, and few slots in the table.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.engine_world import PoppedMessage, World
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.common.errors import Conflict, InvalidReceiptHandle, Overloaded

FIRST_MS = 60_000  # the invisible duration that proxies use for push consumers
CLOCK_JUMPS_MS = (-400_000_000, -3_600_000, -5_000, 3_600_000)
# Letters of the steps, more of the frequent ones.
STEPS = "ssppppaaaccceedrtTTgo"


class Life:
    """One world, the handles of its consumers, and the messages with an ack answered OK."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        random = self.random
        is_ordered = random.random() < 0.5
        self.queues = random.choice([1, 2])
        self.has_clock_jumps = random.random() < 0.4
        self.world = World(
            is_followed=random.random() < 0.6 and not self.has_clock_jumps,
            deliveries_max=random.choice([8, 16, 64, 1000]),
        )
        self.world.topic(queues=self.queues)
        self.world.group(is_ordered=is_ordered, max_attempts=random.choice([2, 60]))
        self.world.group("other")
        self.sent_count = 0
        self.held: list[PoppedMessage] = []
        self.settled: set[str] = set()

    def run(self) -> None:
        for _ in range(self.random.randrange(30, 160)):
            # The share of the group may be used up.
            with suppress(InvalidReceiptHandle, Overloaded, Conflict):
                self.step(self.random.choice(STEPS))

    def step(self, letter: str) -> None:
        random, world, held = self.random, self.world, self.held
        match letter:
            case "s":
                for _ in range(random.randrange(1, 6)):
                    world.send(f"m{self.sent_count}", queue_id=random.randrange(self.queues))
                    self.sent_count += 1
            case "p":
                self.pop()
            case "a" if held:
                one = random.choice(held)
                if world.ack(one) != [AckResult.GONE]:
                    self.settled.add(one.body)
            case "c" if held:
                duration = random.choice([0, 0, 1000, 100_000])
                held.append(world.change(random.choice(held), duration))
            case "e":
                world.end(random.choice("cd"))
            case "d":
                world.disconnect(random.choice("cd"))
            case "r":
                self.restart()
            case "t" | "T":
                world.advance(random.choice([1, 1_500, 3_000, 31_000, 61_000]))
            case "g" if held and random.random() < 0.5:
                world.give_back(random.choice(held))
            case "o":
                world.background()
                world.checkpoint()

    def pop(self) -> None:
        random = self.random
        want, renews = random.choice([1, 3, 32]), random.random() < 0.6
        popped = self.world.pop(
            want,
            invisible_ms=FIRST_MS if renews else random.choice([2_000, 30_000]),
            client_id=random.choice("cd"),
            renews=renews,
            attempt_id=random.choice(["", "x", "y"]),
        )
        assert not self.settled & {one.body for one in popped}, "an ack answered OK was forgotten"
        self.held += popped

    def restart(self) -> None:
        random, world = self.random, self.world
        if world.follower is not None:
            world.fail_over()
            return
        if self.has_clock_jumps and random.random() < 0.5:
            world.now_ms = max(world.now_ms + random.choice(CLOCK_JUMPS_MS), 1)
        world.restart(power_cut=random.random() < 0.5)


@pytest.mark.parametrize("seed", seeds("acks answered ok", 200))
def test_a_message_with_an_ack_answered_ok_is_never_delivered_again(seed: int) -> None:
    Life(seed).run()
