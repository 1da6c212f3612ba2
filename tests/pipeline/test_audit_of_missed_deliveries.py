"""J2: messages that consumer groups never received, and deliveries that did not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.pipeline.test_audit import START_MS, Story, _at
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.jobs.group_progress import read_progress
from tidemill_pipeline.jobs.verdict import AuditVerdict, headlines
from tidemill_pipeline.transforms.audit import AuditTables, audit
from tidemill_pipeline.transforms.findings import BROKEN, KINDS, AuditRules
from tidemill_pipeline.transforms.owed import CLOCKS_MS, PROGRESS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOLD_MS = 10_000_000  # The time of the brokers' answers.
LONG_MS = 2 * CLOCKS_MS
DUE_MS = 30_000


class Case(Story):
    """A story on its own topic and broker group, with the broker's report about group g."""

    def __init__(self, name: str, topic: str = "") -> None:
        super().__init__(name, topic or name)
        self.said: list[tuple[Any, ...]] = []

    def stored(self, offset: int, at_ms: int, queue_id: int = 0) -> None:
        self.add("stored", offset, at_ms, queue_id=queue_id)

    def begin(self) -> None:
        """Deliver the first message of queue 0 to g."""
        self.stored(0, 0)
        self.consumed(0, 10)

    def out(self, *, until_ms: int = DUE_MS, offset: int = 0) -> str:
        """Store a message and deliver it to g with an invisible duration that ends at until_ms."""
        self.stored(offset, 20)
        return self.delivered(offset, 30, due_ms=until_ms)

    def copy(self, event: str, at_ms: int, *, at: int = 7, offset: int = 0, **more: Any) -> int:
        """Add an event of a message's copy in the retry topic."""
        return self.add(
            event,
            at,
            at_ms,
            consumer_group="g",
            topic=f"%RETRY%g+{self.topic}",
            origin_topic=self.topic,
            origin_queue_id=0,
            origin_queue_offset=offset,
            message_id=f"m{offset}",
            **more,
        )

    def dead(self, at_ms: int, *, at: int) -> None:
        """Make message 0 a dead letter of g."""
        self.add(
            "dead-lettered",
            at,
            at_ms,
            consumer_group="g",
            topic="%DLQ%g",
            origin_topic=self.topic,
            origin_queue_id=0,
            origin_queue_offset=0,
            message_id="m0",
        )

    def says(
        self,
        queue_id: int,
        pop: int,
        *,
        commit: int | None = None,
        in_flight: int = 0,
        is_retry: bool = False,
    ) -> None:
        self.said.append(
            (
                self.broker,
                self.topic,
                0,
                queue_id,
                "g",
                is_retry,
                pop,
                pop if commit is None else commit,
                in_flight,
                _at(TOLD_MS),
            )
        )


def audited(spark: SparkSession, *cases: Case, **rules: Any) -> AuditTables:
    said = spark.createDataFrame([row for case in cases for row in case.said], PROGRESS)
    events = cases[0].frame(spark, *cases[1:])
    return audit(events, AuditRules(**rules), progress=said)


def found_in(made: AuditTables, *, kinds: tuple[str, ...] = KINDS) -> list[tuple[Any, ...]]:
    rows = [row for row in made.findings.collect() if row.kind in kinds]
    return sorted((row.broker, row.kind, row.queue_id, row.queue_offset) for row in rows)


def counted(made: AuditTables, name: str) -> dict[str, int]:
    rows = made.summary.groupBy("topic").sum(name).collect()
    return {topic: count for topic, count in rows if count}


def tail(*, pop: int | None) -> Callable[[str], Case]:
    def last(name: str) -> Case:
        """The last message of a queue."""
        case = Case(name)
        case.begin()
        case.stored(1, 20)
        if pop is not None:
            case.says(0, pop)
        return case

    return last


def whole(name: str, *, pop: int) -> Case:
    """A queue without a delivery to g."""
    case = Case(name)
    case.begin()
    for i in range(3):
        case.stored(i, 20 + i, queue_id=1)
    case.says(0, 1)
    case.says(1, pop)
    return case


def single(name: str, *, pop: int) -> Case:
    """Queues of one message each. One message is not delivered."""
    case = Case(name)
    case.begin()
    for queue_id in range(1, 8):
        case.stored(0, 20, queue_id=queue_id)
    for queue_id in range(1, 7):
        case.consumed(0, 30, queue_id=queue_id)
        case.says(queue_id, 1)
    case.says(7, pop)
    return case


def head(name: str, *, is_late: bool) -> Case:
    """The first message of a queue. If `is_late`, g began behind it."""
    case = Case(name)
    if not is_late:
        case.begin()
    for i in range(3):
        case.stored(i, 20 + i, queue_id=1)
    if is_late:
        case.begin()
    for i in (1, 2):
        case.consumed(i, 30 + i, queue_id=1)
    case.says(1, 3)
    return case


def test_an_undelivered_message_before_the_group_position_is_missing(spark: SparkSession) -> None:
    made = audited(
        spark,
        tail(pop=2)("last"),
        whole("whole", pop=3),
        single("single", pop=1),
        head("head", is_late=False),
    )
    assert found_in(made) == [
        ("head", "missing", 1, 0),
        ("last", "missing", 0, 1),
        ("single", "missing", 7, 0),
        ("whole", "missing", 1, 0),
        ("whole", "missing", 1, 1),
        ("whole", "missing", 1, 2),
    ]
    assert counted(made, "waiting") == {}
    details = {row.broker: row.detail for row in made.findings.collect()}
    assert (
        details["last"]
        == "the group's next pop begins after it, but it was not delivered to the group"
    )


def test_the_backlog_of_a_group_is_counted_and_is_not_a_finding(spark: SparkSession) -> None:
    expired = tail(pop=2)("expired")
    expired.add("expired", 1, 40, consumer_group="g", end_offset=2, message_id=None)
    reset = tail(pop=9)("reset")
    reset.add("reset", 9, 40, consumer_group="g", message_id=None)
    young = Case("young")  # Stored after the broker's answer, in a new store.
    young.begin()
    young.stored(1, TOLD_MS - CLOCKS_MS)
    young.says(0, 2)
    # In other queues g began long before. Here its position is unknown.
    there, elsewhere = Case("there", "both"), Case("elsewhere", "both")
    there.begin()
    for i, at_ms in enumerate((10, LONG_MS, LONG_MS)):
        elsewhere.stored(i, at_ms)
    elsewhere.add("reset", 1, LONG_MS + 1, consumer_group="g", queue_id=1, message_id=None)
    elsewhere.says(0, 2)
    made = audited(
        spark,
        tail(pop=1)("last"),
        tail(pop=None)("unasked"),
        whole("whole", pop=0),
        single("single", pop=0),
        head("head", is_late=True),
        expired,
        reset,
        young,
        there,
        elsewhere,
    )
    assert found_in(made) == []
    assert counted(made, "waiting") == {
        "last": 1,
        "unasked": 1,
        "whole": 3,
        "single": 1,
        "young": 1,
        "both": 2,
    }


def test_earlier_messages_are_backlog_if_the_broker_reports_them(spark: SparkSession) -> None:
    next_, skipped = Case("next"), Case("skipped")
    for case in (next_, skipped):
        for i in range(3):
            case.stored(i, i, queue_id=1)
        case.begin()
    next_.says(1, 1)
    # After the broker's answer, a reset set the offset behind all messages.
    skipped.says(1, 0)
    skipped.add("reset", 3, 40, queue_id=1, consumer_group="g", message_id=None)
    skipped.stored(3, 50, queue_id=1)
    skipped.consumed(3, 60, queue_id=1)
    made = audited(spark, next_, skipped)
    assert found_in(made) == []
    assert counted(made, "waiting")["next"] == 2


def test_a_group_with_a_filter_is_owed_nothing(spark: SparkSession) -> None:
    case = tail(pop=None)("last")
    case.out(offset=2)
    case.says(0, 3)
    made = audited(spark, case, filtered_groups=["g"])
    assert found_in(made) == []
    assert counted(made, "waiting") == {}
    assert counted(made, "overdue") == {"last": 1}


def test_an_unsettled_delivery_without_redelivery_is_missing(spark: SparkSession) -> None:
    ended, given_back, revived = Case("ended"), Case("given back"), Case("revived")
    ended.out()
    ended.says(0, 1)
    given_back.out()
    given_back.add("nacked", 0, 40, consumer_group="g", due_ms=40)
    given_back.says(0, 1)
    revived.out()
    revived.copy("revived", DUE_MS)
    revived.says(0, 1)
    revived.says(0, 8, is_retry=True)
    copied = Case("copied")
    copied.out()
    copied.copy("revived", DUE_MS)
    copied.copy("delivered", DUE_MS + 10, due_ms=2 * DUE_MS, attempt=2)
    copied.says(0, 8, is_retry=True)
    made = audited(spark, ended, given_back, revived, copied)
    assert found_in(made, kinds=BROKEN) == [
        (name, "missing", 0, 0) for name in ("copied", "ended", "given back", "revived")
    ]
    for name in ("waiting", "in_flight", "overdue"):
        assert counted(made, name) == {}
    details = {row.broker: row.detail for row in made.findings.collect() if row.kind == "missing"}
    assert details["ended"].startswith("its invisible duration ended at 2023-11-14 ")
    assert details["ended"].endswith(", and it did not come back")
    assert details["revived"].startswith(
        "it was revived, and the group's next pop begins behind it"
    )


def replayed(name: str, *, pop: int) -> Case:
    """A dead letter that was replayed at offset 7 of the retry topic."""
    case = Case(name)
    case.out()
    case.dead(DUE_MS, at=3)
    case.copy("replayed", DUE_MS + 10)
    case.says(0, 1)
    case.says(0, pop, is_retry=True)
    return case


def test_a_replayed_message_is_owed_until_its_group_settles_it_again(spark: SparkSession) -> None:
    dead, acked, again = Case("dead"), replayed("acked", pop=8), replayed("again", pop=8)
    dead.out()
    dead.dead(DUE_MS, at=3)
    acked.copy("delivered", DUE_MS + 20, due_ms=2 * DUE_MS, attempt=1)
    acked.copy("acked", DUE_MS + 30)
    again.copy("delivered", DUE_MS + 20, due_ms=2 * DUE_MS, attempt=1)
    again.dead(2 * DUE_MS, at=4)
    lost, ready = replayed("lost", pop=8), replayed("ready", pop=7)
    made = audited(spark, dead, acked, again, lost, ready)
    assert found_in(made, kinds=BROKEN) == [("lost", "missing", 0, 0)]
    assert counted(made, "waiting") == {"ready": 1}
    assert counted(made, "dead_lettered") == {"again": 1, "dead": 1}
    [detail] = [row.detail for row in made.findings.collect() if row.kind == "missing"]
    assert detail.startswith("it was replayed, and the group's next pop begins behind it")


def test_held_and_settled_messages_are_not_missing(spark: SparkSession) -> None:
    """The messages of an ordered group keep their offsets. Other messages are revived."""
    held, unasked, renewed = Case("held"), Case("unasked"), Case("renewed")
    held.out()
    held.says(0, 1, commit=0, in_flight=1)
    unasked.out()
    # A client extended this delivery. The message lies before the commit offset.
    renewed.out()
    renewed.add("renewed", 0, 40, consumer_group="g", due_ms=DUE_MS)
    renewed.says(0, 1, in_flight=1)
    lasting = Case("lasting")
    lasting.out(until_ms=TOLD_MS)
    lasting.says(0, 1)
    reset, expired, placeless = Case("reset"), Case("expired"), Case("placeless")
    reset.out()
    reset.add("reset", 0, 40, consumer_group="g", message_id=None)
    expired.out()
    expired.add("expired", 0, 40, consumer_group="g", end_offset=1)
    delivery = placeless.out()
    placeless.add("acked", 0, 40, topic="", message_id=None, delivery=delivery)
    waits, taken, through = Case("waits"), Case("taken"), Case("through")
    for case in (waits, taken, through):
        case.out()
        case.copy("revived", DUE_MS)
    waits.says(0, 7, is_retry=True)
    # For an expired message, an event reports only its last offset.
    taken.add(
        "expired",
        7,
        DUE_MS + 10,
        topic="%RETRY%g+taken",
        consumer_group="g",
        end_offset=8,
        message_id=None,
    )
    again = through.copy("delivered", DUE_MS + 10, due_ms=2 * DUE_MS, attempt=2)
    through.copy("acked", DUE_MS + 20, delivery=f"through:{again}:0")
    for case in (reset, expired, placeless, taken, through):
        case.says(0, 1)
        case.says(0, 8, is_retry=True)
    made = audited(
        spark,
        held,
        unasked,
        renewed,
        lasting,
        reset,
        expired,
        placeless,
        waits,
        taken,
        through,
        closed_at_ms=START_MS + TOLD_MS,
    )
    assert found_in(made, kinds=BROKEN) == []
    assert counted(made, "overdue") == {"held": 1, "unasked": 1, "renewed": 1}
    assert counted(made, "in_flight") == {"held": 1, "unasked": 1, "renewed": 1, "lasting": 1}
    assert counted(made, "waiting") == {"waits": 1}


def timer(name: str, *events: str) -> Case:
    """A delayed message with its events. Each firing stores a new message."""
    case = Case(name)
    places = 0
    for event in ("scheduled", *events):
        if event == "consumed":
            case.consumed(places - 1, 5_010, timer_id=1, message_id="t")
            continue
        is_fired = event == "fired"
        due = {} if event == "recalled" else {"due_ms": 5_000}
        case.add(
            event,
            places if is_fired else 1,
            5_000 if is_fired else 10,
            timer_id=1,
            message_id="t",
            **due,
        )
        places += is_fired
    return case


def test_a_timer_fires_once_and_not_in_spite_of_its_recall(spark: SparkSession) -> None:
    came = timer("came", "recalled")
    came.consumed(0, 5_010, timer_id=1, message_id="t")
    made = audited(
        spark,
        timer("twice", "fired", "consumed", "fired", "consumed"),
        timer("recalled", "recalled", "fired", "consumed"),
        came,
        timer("honest", "moved", "scheduled", "fired", "consumed"),
        timer("honestly recalled", "moved", "recalled"),
    )
    assert found_in(made) == [
        ("came", "unexpected", None, None),
        ("recalled", "unexpected", None, None),
        ("twice", "duplicate", None, None),
    ]
    rows = {row.broker: row for row in made.findings.collect()}
    assert rows["twice"].detail == "fired 2 times"
    assert rows["twice"].journey.count('"fired"') == 2
    assert rows["recalled"].detail == "it was recalled, and fired all the same"
    assert rows["came"].detail == "it was recalled, and delivered all the same"


def test_the_page_header_reports_unfinished_messages() -> None:
    row = {"waiting": 1_200, "in_flight": 3, "overdue": 1}
    counts = dict.fromkeys(KINDS, 0)
    left = AuditVerdict(counts=counts, totals=[row, row], findings=[], unreadable=[])
    text = (
        "2,400 wait to be delivered, 6 are in flight, 2 of these for longer than their invisible"
        " duration"
    )
    assert headlines(left) == [
        ("good", "No message was lost or early among the settled messages."),
        ("", f"Not settled yet, counted per group: {text}."),
    ]
    unexpected = AuditVerdict(
        counts=counts | {"unexpected": 2}, totals=[], findings=[], unreadable=[]
    )
    assert unexpected.is_broken
    assert headlines(unexpected) == [("bad", "Delivered or fired after a recall: 2.")]


def test_progress_covers_the_current_topic_and_reachable_brokers(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    given = {"endpoints": cluster.endpoint}
    for broker in ("a", "b"):
        cluster.add("orders", broker, 0, 5)
        cluster.add("%DLQ%g", broker, 0, 1)
        said = pb.Progress(
            consumer_group="g", topic="orders", pop_offset=4, commit_offset=3, in_flight_count=1
        )
        letters = pb.Progress(consumer_group="h", topic="%DLQ%g", pop_offset=1, commit_offset=1)
        # A pulling consumer pops nothing. The id of a deleted topic is unknown.
        pulled = pb.Progress(consumer_group="p", topic="orders", pop_offset=-1, pull_offset=2)
        gone = pb.Progress(consumer_group="g", topic="gone", pop_offset=4)
        cluster.brokers[broker].progress = [said, letters, pulled, gone]
    cluster.brokers["b"].error = "it is away"
    found = read_progress(spark, given)
    assert found is not None
    assert (
        f"{found.schema.simpleString()}"
        == spark.createDataFrame([], PROGRESS).schema.simpleString()
    )
    ids = cluster.brokers["a"].topic_ids
    rows = found.drop("told_at").collect()
    assert sorted(map(tuple, rows)) == [
        ("a", "%DLQ%g", ids["%DLQ%g"], 0, "h", False, 1, 1, 0),
        ("a", "orders", ids["orders"], 0, "g", False, 4, 3, 1),
    ]
    # An audit of some topics ignores dead letters. Events that end earlier give smaller counts.
    asked = read_progress(spark, {**given, "topics": "orders"})
    assert asked is not None
    assert [row.topic for row in asked.collect()] == ["orders"]
    assert read_progress(spark, {**given, "endingTimestamp": str(START_MS)}) is None
