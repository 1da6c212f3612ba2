"""The metrics of dead letters in one scenario."""

from __future__ import annotations

from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.letter_world import LetterWorld
from tests.unit.broker.test_transaction_metrics import Source
from tidemill.broker.engine.layout.operation import OperationKind, OperationState
from tidemill.broker.metrics.dead_letter_metrics import DeadLetterMetrics
from tidemill.common.metrics import Registry


class Scraped:
    """A world with its metrics."""

    def __init__(self) -> None:
        self.world = LetterWorld()
        self.registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
        DeadLetterMetrics(self.registry, Source(self.world.engine, self.world.now_ms))

    def value(self, name: str, group: str = GROUP, **labels: str) -> float | None:
        """Scrape, and return one sample; None if it is missing."""
        wanted = {"consumer_group": group, **labels}.items()
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == f"rocketmq_dlq_{name}" and wanted <= sample.labels.items():
                    return sample.value
        return None


def test_dead_letters_count_by_state_and_their_settlements_by_result() -> None:
    scraped = Scraped()
    world = scraped.world
    world.topic(TOPIC)
    world.group("quiet")
    world.dead("a", "b", "c", "d")
    assert scraped.value("replayed_total", result="replayed") == 0
    world.replay(0, 0)
    world.discard(1, 2)
    assert scraped.value("messages", state="open") == 1
    assert scraped.value("messages", state="replayed") == 1
    assert scraped.value("messages", state="discarded") == 2
    assert scraped.value("messages", "quiet", state="open") == 0
    assert scraped.value("replayed_total", result="replayed") == 1
    assert scraped.value("replayed_total", result="already_replayed") == 1
    assert scraped.value("discarded_total") == 2
    assert scraped.value("discarded_total", "quiet") is None


def test_operations_count_by_kind_and_state() -> None:
    scraped = Scraped()
    world = scraped.world
    world.topic(TOPIC)
    world.dead("a", "b")
    world.begin_operation(OperationKind.DISCARD, rate_per_s=1)
    world.begin_operation(OperationKind.REPLAY, tag="none")
    world.run_due()
    found = {
        (sample.labels["kind"], sample.labels["state"]): sample.value
        for family in scraped.registry.collect()
        for sample in family.samples
        if sample.name == "rocketmq_operations"
    }
    assert {labels for labels, value in found.items() if value} == {
        ("discard", "running"),
        ("replay", "done"),
    }
    assert len(found) == len(OperationKind) * len(OperationState)


def test_messages_that_retention_removes_count_in_no_state() -> None:
    scraped = Scraped()
    scraped.world.topic(TOPIC)
    scraped.world.dead("a", "b", "c")
    scraped.world.discard(0, 1)
    scraped.world.purge(f"%DLQ%{GROUP}", low=1)
    assert scraped.value("messages", state="open") == 1
    assert scraped.value("messages", state="discarded") == 1


def test_the_counts_of_a_deleted_group_are_forgotten() -> None:
    scraped = Scraped()
    world = scraped.world
    world.topic(TOPIC)
    world.dead("a", "b")
    world.replay(0)
    world.discard(1)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    assert scraped.value("replayed_total", result="replayed") is None
    assert not world.engine.dead_letters.replays
    assert not world.engine.dead_letters.discards
